"""Stop strings over a stream of text pieces.

A stop string may begin in one piece and end in another, so text that could still turn out to be the beginning
of one is held back: exactly the longest suffix of the text that is a proper prefix of a stop string, no more.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one output text. Which stop string wins does not depend on how the text is cut into pieces: the
    one that is complete first; of those complete at the same character, the one that began first.

    Work is in proportion to the text and the number of stop strings, whatever they are like.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops`: non-empty strings. `include`: the stop string itself is shown."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, piece: str) -> str:
        """The text that may be shown now that `piece` has arrived. After a match: nothing more."""
        if not self._matchers:
            return piece
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        found: tuple[int, int, str] | None = None
        for matcher in self._matchers:
            end = matcher.push(piece)
            if end is None:
                continue
            end += len(self._held)
            start = end - len(matcher.stop)
            if found is None or (end, start) < found[:2]:
                found = (end, start, matcher.stop)
        if found is not None:
            end, start, self.matched = found
            self._held = ""
            return text[:end] if self._include else text[:start]
        keep = len(text) - max(matcher.begun for matcher in self._matchers)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The held text, when the output ended without a match."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """One stop string looked for in a text that comes in pieces.

    Source: Knuth, Morris, Pratt 1977, doi:10.1137/0206024. The table of failures is made only as far as the
    text has ever matched, so a long stop string costs nothing until it begins.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.begun = 0
        """Length of the longest suffix of the text that is a proper prefix of the stop string."""
        self._failures = [0, 0]
        """[k]: length of the longest proper suffix of stop[:k] that is also its prefix."""

    def push(self, piece: str) -> int | None:
        """Where in `piece` the stop string is first complete; then nothing more may be pushed."""
        stop, begun = self.stop, self.begun
        at = 0
        while at < len(piece):
            if not begun:
                at = piece.find(stop[0], at)
                if at < 0:
                    break
            while begun and piece[at] != stop[begun]:
                begun = self._failures[begun]
            begun += piece[at] == stop[begun]
            at += 1
            if begun == len(stop):
                return at
            if begun == len(self._failures):
                self._extend()
        self.begun = begun
        return None

    def _extend(self) -> None:
        known = len(self._failures)
        last = self.stop[known - 1]
        length = self._failures[known - 1]
        while length and self.stop[length] != last:
            length = self._failures[length]
        self._failures.append(length + (self.stop[length] == last))
