"""Bytes from a pipe as lines of text. Pure."""

from __future__ import annotations

_LONGEST = 1 << 16
"""A line is cut there, so that a child which never ends a line costs no memory."""


class LineSplitter:
    """Splits at line feeds. Of a line redrawn with carriage returns (a progress bar) only the last state is
    kept.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            whole.append(self._rest)
            self._rest = b""
        return [_text(line) for line in whole]

    def end(self) -> list[str]:
        """What came after the last line feed."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
