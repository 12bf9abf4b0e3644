"""The batch scheduler's coroutine: steps 2, 5 and 9 of a request, on every role.

It admits what fits, publishes steps to the worker without waiting for them, and feeds results back. What the
scheduler decides is in `pdserve.engine`; here is only when it is asked and who hears of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from pdserve.engine.events import Event, Scheduled
from pdserve.engine.plan import Plan, StepResult
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Scheduler
from pdserve.observe.metrics import NodeMetrics


class EngineLoop:
    """Owns when the scheduler runs; the scheduler owns requests and pages, the worker the steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        submit: Callable[[Plan], None],
        metrics: NodeMetrics,
        *,
        on_receiving: Callable[[Request], None],
        on_scheduled: Callable[[Scheduled], None],
        on_step_ended: Callable[[int], None],
        on_event: Callable[[Event], None],
    ) -> None:
        """`on_scheduled` is told of a step before its plan goes to the worker, `on_step_ended` of its result
        before the events it brought; `on_receiving` of requests whose KV has to be fetched."""
        self._scheduler = scheduler
        self._submit = submit
        self._metrics = metrics
        self._on_receiving = on_receiving
        self._on_scheduled = on_scheduled
        self._on_step_ended = on_step_ended
        self._on_event = on_event
        self._results: deque[StepResult] = deque()
        self._tokens: dict[int, int] = {}
        self._wake = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self.progress_at = time.monotonic()
        """When a step last ended, or the last time that none was wanted: what /live measures."""

    def wake(self) -> None:
        """Something may have become possible: a request, room, a page."""
        self._wake.set()

    def result(self, result: StepResult) -> None:
        """The worker's result of the oldest published step."""
        self._results.append(result)
        self._wake.set()

    @property
    def steps_in_flight(self) -> int:
        return len(self._tokens)

    async def run(self) -> None:
        """Run until cancelled. Raises what the scheduler raises on a worker that breaks the order."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._turn()

    def _turn(self) -> None:
        now = time.monotonic()
        while self._results:
            self._complete(self._results.popleft(), now)
        for event in self._scheduler.expire(now):
            self._on_event(event)
        for request in self._scheduler.admit(now):
            self._on_receiving(request)
        while (scheduled := self._scheduler.schedule(now)) is not None:
            if not self._tokens:
                self.progress_at = now
            self._tokens[scheduled.plan.step] = scheduled.prompt_tokens + scheduled.decode_tokens
            self._on_scheduled(scheduled)
            self._submit(scheduled.plan)
        self._arm(now)

    def _complete(self, result: StepResult, now: float) -> None:
        self.progress_at = now
        self._metrics.step(self._tokens.pop(result.step), (result.ended_ns - result.started_ns) / 1e9)
        self._on_step_ended(result.step)
        for event in self._scheduler.complete(result, now):
            self._on_event(event)

    def _arm(self, now: float) -> None:
        """Wake again when the next waiting request's deadline comes."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        deadline = self._scheduler.next_deadline()
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(max(0.0, deadline - now), self.wake)

    def close(self) -> None:
        """Stop the deadline timer. Idempotent."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
