"""The bounded queue of requests that wait for admission."""

from __future__ import annotations

import heapq
from collections import deque

from pdserve.engine.pages import InvariantError
from pdserve.engine.request import Phase, Request

_SLACK = 64
"""Dead heap entries that are let be, so that short queues are not rebuilt all the time."""


class WaitingQueue:
    """Requests in phase WAITING, by priority (lower first), then arrival.

    Whoever moves a request out of WAITING says so with `left`; its heap entries die where they lie and are
    dropped when they surface, or all at once when the dead outnumber the living. So every operation is
    O(log n) at worst, amortised, and the counts are true at any time.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._departures: deque[float] = deque(maxlen=64)
        self.count = 0
        self.tokens = 0

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority, request.seq, request))
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.seq, request))
        self.count += 1
        self.tokens += len(request.prompt)

    def head(self) -> Request | None:
        """The request to admit next. Nobody may be admitted before it, or a large one could starve."""
        while self._heap and self._heap[0][2].phase is not Phase.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def left(self, request: Request) -> None:
        """`request` is not WAITING any more."""
        self.count -= 1
        self.tokens -= len(request.prompt)
        if len(self._heap) > 2 * self.count + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].phase is Phase.WAITING]
            heapq.heapify(self._heap)
        if len(self._deadlines) > 2 * self.count + _SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2].phase is Phase.WAITING]
            heapq.heapify(self._deadlines)

    def admitted(self, now: float) -> None:
        """One request was admitted at `now` (it feeds `retry_after`)."""
        self._departures.append(now)

    def next_deadline(self) -> float | None:
        """When the next waiting request expires."""
        while self._deadlines and self._deadlines[0][2].phase is not Phase.WAITING:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now: float) -> Request | None:
        """One waiting request whose deadline is not after `now`; move it on before asking again."""
        deadline = self.next_deadline()
        return self._deadlines[0][2] if deadline is not None and deadline <= now else None

    def retry_after(self, now: float) -> float:
        """Seconds the queue takes to drain at the rate of the latest admissions, from 1 to 60.

        A stall lengthens the estimate by itself: the time since the last admission counts.
        """
        if not self._departures:
            return 1.0
        interval = (now - self._departures[0]) / len(self._departures)
        return min(60.0, max(1.0, self.count * interval))

    def check(self) -> None:
        """Raises `InvariantError` unless the counts are those of the living. O(n)."""
        live = self.live()
        tokens = sum(len(request.prompt) for request in live)
        if (len(live), tokens) != (self.count, self.tokens):
            raise InvariantError(
                f"{len(live)} requests of {tokens} tokens wait; counted: {self.count} of {self.tokens}"
            )

    def live(self) -> list[Request]:
        """All waiting requests, in no order. O(n): for checks."""
        return [entry[2] for entry in self._heap if entry[2].phase is Phase.WAITING]
