"""A worker's stderr, as its node reads it: line by line, the last ones kept for the error that ends it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable

_READ_SIZE = 1 << 14
_MAX_LINE = 2000
_KEPT_LINES = 20


class StderrPipe:
    """The read end of a pipe, drained by the loop. Lines are cut at `_MAX_LINE` bytes: bounded."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        """Open the pipe. `write_end` is for the child; `reading` takes over once the child has it."""
        self._fd, self.write_end = os.pipe()
        os.set_blocking(self._fd, False)
        self._on_line = on_line
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        return tuple(self._lines)

    def reading(self, loop: asyncio.AbstractEventLoop) -> None:
        """The child has its end: close ours of it and read from here on."""
        self._close_write_end()
        self._loop = loop
        loop.add_reader(self._fd, self.drain)

    def drain(self) -> None:
        """Take what is there now, without waiting."""
        while self._fd >= 0:
            try:
                data = os.read(self._fd, _READ_SIZE)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                self._stop_reading()
                return
            self._take(data)

    def close(self) -> None:
        """Drain what is there, then close. A grandchild that kept the pipe is not waited for. Idempotent."""
        self._close_write_end()
        if self._fd < 0:
            return
        self.drain()
        if self._partial:
            self._line(self._partial)
            self._partial = b""
        self._stop_reading()
        os.close(self._fd)
        self._fd = -1

    def _stop_reading(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
            self._loop = None

    def _close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def _take(self, data: bytes) -> None:
        *lines, rest = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line)
        while len(rest) > _MAX_LINE:
            self._line(rest[:_MAX_LINE])
            rest = rest[_MAX_LINE:]
        self._partial = rest

    def _line(self, line: bytes) -> None:
        text = line[:_MAX_LINE].decode(errors="replace").rstrip()
        if text:
            self._lines.append(text)
            self._on_line(text)
