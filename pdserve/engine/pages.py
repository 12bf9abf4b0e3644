"""Which page of the arena is whose: the page allocator.

    FREE ──allocate──► HELD ─────────────release──► PENDING ──step_ended──► FREE
      └───allocate──► DESTINATION ──received──► HELD        (straight to FREE when no step names it)
                           └──quarantine──► QUARANTINED ──release──► as above

HELD: a request reads and writes it through published steps, or the messenger sends from it. DESTINATION: a
peer may write to it at any moment. QUARANTINED: a peer may still write to it, but nobody waits for it.
PENDING: released, but a published step that has not ended names it; an overlapped step still writes the KV of
a sequence that has just ended, and RDMA is not ordered with it. Page 0 is SCRAP: padding rows write there, it
is never allocated.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

from pdserve.engine.spans import FreeSpans
from pdserve.errors import PdserveError


class InvariantError(PdserveError):
    """The bookkeeping contradicts itself: a bug in pdserve."""

    code = "invariant_broken"


class PageState(enum.IntEnum):
    SCRAP = 0
    FREE = 1
    HELD = 2
    DESTINATION = 3
    QUARANTINED = 4
    PENDING = 5


class PageAllocator:
    """Hands out page ids 1..num_pages-1. Whoever allocates a page names it again to move it on.

    Every move checks the state it starts from, so that a page freed twice is an `InvariantError` on the spot
    and not another request's wrong text. Reserved pages are a count: free pages promised to requests.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.reserved = 0
        self._state = bytearray([PageState.FREE]) * num_pages
        self._state[0] = PageState.SCRAP
        self._count = [0] * len(PageState)
        self._count[PageState.SCRAP] = 1
        self._count[PageState.FREE] = num_pages - 1
        self._spans = FreeSpans()
        if num_pages > 1:
            self._spans.insert(1, num_pages - 1)
        self._pending: dict[int, list[int]] = {}  # step -> pages that become free when it has ended
        self._ended = -1

    @property
    def available(self) -> int:
        """Free pages that are not promised to anyone."""
        return self._count[PageState.FREE] - self.reserved

    def count(self, state: PageState) -> int:
        return self._count[state]

    def state(self, page: int) -> PageState:
        return PageState(self._state[page])

    def reserve(self, count: int) -> None:
        """Promise `count` free pages. Raises `InvariantError` where they are not available."""
        if count > self.available:
            raise InvariantError(f"reserve {count} pages: only {self.available} are available")
        self.reserved += count

    def unreserve(self, count: int) -> None:
        """Take back a promise that `take_reserved` has not used."""
        if count > self.reserved:
            raise InvariantError(f"unreserve {count} pages: only {self.reserved} are reserved")
        self.reserved -= count

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages, now HELD, adjacent where possible (and following page `after`, if given).

        Raises `InvariantError` where they are not available: ask `available` first.
        """
        if count > self.available:
            raise InvariantError(f"allocate {count} pages: only {self.available} are available")
        pages = self._spans.take(count, after)
        self._move(pages, PageState.FREE, PageState.HELD)
        return pages

    def take_reserved(self, after: int | None = None) -> int:
        """One page of those reserved, now HELD."""
        self.unreserve(1)
        (page,) = self._spans.take(1, after)
        self._move((page,), PageState.FREE, PageState.HELD)
        return page

    def expose(self, pages: Sequence[int]) -> None:
        """HELD → DESTINATION: a peer is about to be told that it may write."""
        self._move(pages, PageState.HELD, PageState.DESTINATION)

    def received(self, pages: Sequence[int]) -> None:
        """DESTINATION → HELD: everything has arrived, so no peer has anything left to write."""
        self._move(pages, PageState.DESTINATION, PageState.HELD)

    def quarantine(self, pages: Sequence[int]) -> None:
        """DESTINATION → QUARANTINED: given up, but a peer may still write."""
        self._move(pages, PageState.DESTINATION, PageState.QUARANTINED)

    def release(self, pages: Sequence[int], last_step: int) -> None:
        """HELD → FREE, or PENDING until `last_step`, the last published one to name them, ends (-1: none)."""
        self._release(pages, PageState.HELD, last_step)

    def safe(self, pages: Sequence[int], last_step: int = -1) -> None:
        """QUARANTINED → FREE or PENDING: there is proof that no peer can write any more."""
        self._release(pages, PageState.QUARANTINED, last_step)

    def step_ended(self, step: int) -> None:
        """Steps up to `step` have ended. Steps end in order."""
        if step != self._ended + 1:
            raise InvariantError(f"step {step} ended after step {self._ended}")
        self._ended = step
        pages = self._pending.pop(step, None)
        if pages is not None:
            self._move(pages, PageState.PENDING, PageState.FREE)
            self._insert(pages)

    def check(self) -> None:
        """Raises `InvariantError` unless counts, states, spans and the pending list agree. O(num_pages)."""
        for state in PageState:
            found = self._state.count(state)
            if found != self._count[state]:
                raise InvariantError(f"{found} pages are {state.name}, the counter says {self._count[state]}")
        if sum(self._count) != self.num_pages or self._state[0] != PageState.SCRAP:
            raise InvariantError(f"pages do not add up: {self._count} of {self.num_pages}")
        if not 0 <= self.reserved <= self._count[PageState.FREE]:
            raise InvariantError(f"{self.reserved} pages reserved, {self._count[PageState.FREE]} free")
        free = 0
        for first, length in self._spans.spans().items():
            free += length
            span = self._state[first : first + length]
            if span.count(PageState.FREE) != length:
                raise InvariantError(f"span [{first}, {first + length}) holds a page that is not free")
        if not free == self._spans.total == self._count[PageState.FREE]:
            raise InvariantError(f"spans hold {free} pages, {self._count[PageState.FREE]} are free")
        pending = [page for pages in self._pending.values() for page in pages]
        if len(pending) != self._count[PageState.PENDING] or len(set(pending)) != len(pending):
            raise InvariantError(f"{len(pending)} pages wait for a step, the counter disagrees")
        if any(step <= self._ended for step in self._pending):
            raise InvariantError(f"pages wait for a step that has ended ({self._ended})")

    def _release(self, pages: Sequence[int], source: PageState, last_step: int) -> None:
        if last_step > self._ended:
            self._move(pages, source, PageState.PENDING)
            self._pending.setdefault(last_step, []).extend(pages)
        else:
            self._move(pages, source, PageState.FREE)
            self._insert(pages)

    def _move(self, pages: Sequence[int], source: PageState, target: PageState) -> None:
        state = self._state
        for page in pages:
            if state[page] != source:
                raise InvariantError(f"page {page} is {PageState(state[page]).name}, not {source.name}")
            state[page] = target
        self._count[source] -= len(pages)
        self._count[target] += len(pages)

    def _insert(self, pages: Sequence[int]) -> None:
        for first, length in adjacent(pages):
            self._spans.insert(first, length)


def adjacent(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut a page table into (first page, count) of ascending neighbours."""
    index = 0
    while index < len(pages):
        first = pages[index]
        length = 1
        while index + length < len(pages) and pages[index + length] == first + length:
            length += 1
        yield first, length
        index += length
