"""Stop strings over a stream of text pieces.

A stop string may begin in one piece and end in another, so text that could still turn out to be the beginning
of one is held back: exactly the longest suffix of the text that is a proper prefix of a stop string, no more.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one output text. Which stop string wins does not depend on how the text is cut into pieces: the
    one that is complete first; of those complete at the same character, the one that began first.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops`: non-empty strings. `include`: the stop string itself is shown."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """The text that may be shown now that `piece` has arrived. After a match: nothing more."""
        if not self._stops:
            return piece
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, self.matched = found
            self._held = ""
            return text[:end] if self._include else text[:start]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The held text, when the output ended without a match."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Where the longest suffix of `text` begins that is a proper prefix of some stop string."""
        earliest = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < earliest:
                if stop.startswith(text[at:]):
                    earliest = at
                    break
                at = text.find(stop[0], at + 1)
        return earliest
