"""Free pages as spans of adjacent ids, so that an allocation is as contiguous as it can be.

Adjacent pages on both sides of a transfer merge into one RDMA write. Spans live in bins by the power of two
of their length (segregated fit, as in Knuth, The Art of Computer Programming 1, section 2.5): taking looks at
a few spans whatever the number of free pages, returning merges with both neighbours at once.
"""

from __future__ import annotations

_PROBES = 4
"""Spans of the one bin that may or may not be long enough that are looked at before a longer one is cut."""


class FreeSpans:
    """A set of page ids with `take` and `insert`. Deterministic: the same calls give the same pages."""

    def __init__(self) -> None:
        self._length: dict[int, int] = {}  # first page -> pages in the span
        self._first: dict[int, int] = {}  # last page -> first page
        self._bins: list[dict[int, None]] = []  # floor(log2(length)) -> first pages, oldest first
        self.total = 0

    def spans(self) -> dict[int, int]:
        """First page -> length. A copy, for checks and statistics."""
        return dict(self._length)

    def insert(self, first: int, count: int) -> None:
        """Add pages [first, first + count), none of which may be in the set."""
        self.total += count
        before = self._first.get(first - 1)
        if before is not None:
            length = self._remove(before)
            first, count = before, count + length
        if first + count in self._length:
            count += self._remove(first + count)
        self._add(first, count)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove and return `count` pages, in as few spans as the bins show; `count` must be there.

        `after`: a page whose successor is preferred, to continue a page table.
        """
        pages: list[int] = []
        if after is not None and after + 1 in self._length:
            self._cut(after + 1, count, pages)
        while len(pages) < count:
            left = count - len(pages)
            self._cut(self._choose(left), left, pages)
        return pages

    def _choose(self, count: int) -> int:
        bins = self._bins
        exact = count.bit_length() - 1
        if exact < len(bins):
            for _, first in zip(range(_PROBES), bins[exact], strict=False):
                if self._length[first] >= count:
                    return first
        for index in range(exact + 1, len(bins)):
            if bins[index]:
                return next(iter(bins[index]))
        for index in range(min(exact, len(bins) - 1), -1, -1):  # none is long enough: the longest kind first
            if bins[index]:
                return next(iter(bins[index]))
        raise LookupError(f"{count} pages wanted, none is free")

    def _cut(self, first: int, count: int, pages: list[int]) -> None:
        length = self._remove(first)
        taken = min(length, count)
        pages.extend(range(first, first + taken))
        self.total -= taken
        if taken < length:
            self._add(first + taken, length - taken)

    def _add(self, first: int, count: int) -> None:
        self._length[first] = count
        self._first[first + count - 1] = first
        index = count.bit_length() - 1
        while len(self._bins) <= index:
            self._bins.append({})
        self._bins[index][first] = None

    def _remove(self, first: int) -> int:
        length = self._length.pop(first)
        del self._first[first + length - 1]
        del self._bins[length.bit_length() - 1][first]
        return length
