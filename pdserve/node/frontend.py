"""Steps 1, 2 and 9 between `http/` and the engine: the node's side of `http.frontend.Frontend`."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from pdserve.engine.events import Event, Expired, TokenEvent
from pdserve.engine.request import Phase, Request
from pdserve.engine.sampling import SamplingParams
from pdserve.engine.scheduler import Scheduler
from pdserve.errors import Draining, Overloaded, PdserveError, WrongRole
from pdserve.http.frontend import Generation, Health, ServedModel, TokenOutput
from pdserve.node.decode_messenger import DecodeMessenger
from pdserve.node.generation import NodeGeneration
from pdserve.observe.metrics import NodeMetrics
from pdserve.observe.trace import Mark, Step, TraceRecord, TraceStore


class NodeFrontend:
    """Owns the running generations of a node; requests and pages are the scheduler's."""

    def __init__(
        self,
        card: ServedModel,
        metrics: NodeMetrics,
        traces: TraceStore,
        *,
        seed: int,
        health: Callable[[], Health],
        trace: Callable[[str], Awaitable[dict[str, Any] | None]],
    ) -> None:
        """`seed`: of the stream from which sequences without a seed of their own get one."""
        self.card = card
        self.draining = False
        self.generations: dict[str, NodeGeneration] = {}
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last generation has ended."""
        self._metrics = metrics
        self._traces = traces
        self._seeds = random.Random(seed)
        self._health = health
        self._trace = trace
        self._scheduler: Scheduler | None = None
        self._messenger: DecodeMessenger | None = None
        self._wake: Callable[[], None] = lambda: None

    def start(
        self, scheduler: Scheduler, messenger: DecodeMessenger | None, wake: Callable[[], None]
    ) -> None:
        """The engine runs: take requests. `messenger`: where the prompt's KV comes from; None: from here."""
        self._scheduler = scheduler
        self._messenger = messenger
        self._wake = wake

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        max_tokens: int,
        *,
        priority: int = 0,
        trace_parent: str | None = None,
        arrival: float | None = None,
    ) -> Generation:
        scheduler = self._accepting()
        now = time.monotonic()
        scheduler.validate(len(prompt_ids), max_tokens)
        if self._messenger is not None and len(prompt_ids) > 1:
            self._messenger.check_capacity(len(prompt_ids))
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
        request_id = self._unused(request_id, scheduler)
        request = scheduler.submit(request_id, prompt_ids, sampling, max_tokens, priority=priority, now=now)
        generation = NodeGeneration(request, self._abandon)
        self.generations[request_id] = generation
        record = self._traces.begin(request_id)
        record.prompt_tokens = len(prompt_ids)
        record.mark(Mark.RECEIVED, now if arrival is None else arrival)
        record.mark(Step.PARSED, now)
        self._wake()
        return generation

    def health(self) -> Health:
        return self._health()

    def metrics(self) -> bytes:
        return self._metrics.render()

    async def trace(self, request_id: str) -> dict[str, Any] | None:
        return await self._trace(request_id)

    # What the engine and the messenger tell.

    def engine_event(self, event: Event) -> None:
        """A token of one of our sequences, or the end of its patience."""
        match event:
            case TokenEvent(id, token, logprob, top, reason):
                self._token(id, TokenOutput(token, logprob, top, reason))
            case Expired(id, waited):
                self.fail(id, Overloaded(f"waited {waited:.1f} s for a place in the batch", retry_after=1.0))

    def fail(self, request_id: str, error: PdserveError) -> None:
        """The scheduler has let go of this request, for this reason."""
        self._finish(request_id, "error", error.message)
        generation = self._pop(request_id)
        if generation is not None:
            generation.fail(error)

    def fail_all(self, error: PdserveError) -> None:
        """End every generation with an error, in the engine too."""
        for request_id, generation in list(self.generations.items()):
            generation.fail(error)
            self._abandon(request_id, "error")

    # Inside.

    def _accepting(self) -> Scheduler:
        if self.draining:
            raise Draining("the server is shutting down", retry_after=1.0)
        if self.card.role == "prefill":
            raise WrongRole("this is a prefill node, which generates nothing; ask a decode node")
        if self._scheduler is None:
            raise Overloaded("the model is still loading", retry_after=1.0)
        return self._scheduler

    def _unused(self, wanted: str, scheduler: Scheduler) -> str:
        """`wanted`, or a variation: a request whose client left may still be known while its pages are
        quarantined, and its client may come back under the same id."""
        id = wanted
        while scheduler.get(id) is not None:
            id = f"{wanted}-{self._seeds.getrandbits(32):08x}"
        return id

    def _token(self, id: str, output: TokenOutput) -> None:
        generation = self.generations.get(id)
        if generation is None:
            return
        record = self._traces.get(id)
        if record is not None:
            if record.output_tokens is None:
                self._admitted(record, generation.request)
            record.token(time.monotonic())
        if output.finish_reason is not None:
            self._finish(id, output.finish_reason)
            self._pop(id)
        generation.put(output)

    def _admitted(self, record: TraceRecord, request: Request) -> None:
        """Before its first token: how long it waited for its pages."""
        if request.admitted_at is not None:
            record.mark(Step.RESERVED, request.admitted_at)
            self._metrics.queued(request.admitted_at - request.arrival)

    def _finish(self, id: str, reason: str, error: str | None = None) -> None:
        record = self._traces.get(id)
        if record is not None and id in self.generations:
            record.finish_reason = reason
            record.error = error
            record.mark(Step.FINISHED, time.monotonic())

    def _abandon(self, request_id: str, reason: str) -> None:
        """A generation ends before its last token: give back what it owns, here and at its peer."""
        if self._scheduler is None or request_id not in self.generations:
            return
        self._finish(request_id, reason)
        phase = self._scheduler.cancel(request_id, time.monotonic())
        if phase is Phase.QUARANTINED and self._messenger is not None:
            self._messenger.cancel(request_id)
        self._pop(request_id)
        self._wake()

    def _pop(self, request_id: str) -> NodeGeneration | None:
        generation = self.generations.pop(request_id, None)
        if not self.generations:
            self.on_idle()
        return generation
