"""Steps 3 and 8: the decode side's messenger, as the effects of `messenger.decode` on a real fabric."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.engine.request import Request
from pdserve.engine.scheduler import Scheduler
from pdserve.errors import ContextLengthExceeded, NoPeer, PdserveError
from pdserve.fabric import ImmCounters
from pdserve.messenger.choice import longest_prompt
from pdserve.messenger.decode import DecodeMachine
from pdserve.messenger.events import (
    ArmSlot,
    CancelRequest,
    DisarmSlot,
    Effect,
    Failed,
    Fence,
    Fenced,
    PagesSafe,
    Ready,
    Rehello,
    Send,
    SlotCounted,
    SlotOvershoot,
    SlotProgress,
    Submit,
)
from pdserve.messenger.imm import unpack
from pdserve.messenger.messages import Accepted, Load, Message, Prefill, Quiet
from pdserve.node.messenger import MessengerShell
from pdserve.node.shell import Crash, Spawn
from pdserve.observe.metrics import NodeMetrics
from pdserve.observe.trace import Step, TraceRecord, TraceStore


class DecodeMessenger(MessengerShell):
    """Fetches the KV of RECEIVING requests and tells the scheduler when it is there."""

    def __init__(
        self,
        machine: DecodeMachine,
        scheduler: Scheduler,
        counters: ImmCounters,
        traces: TraceStore,
        metrics: NodeMetrics,
        *,
        crash: Crash,
        spawn: Spawn,
        wake: Callable[[], None],
        on_failed: Callable[[str, PdserveError], None],
    ) -> None:
        """`wake`: the engine loop's. `on_failed(request, error)`: a request ended without its KV."""
        super().__init__(machine, crash, spawn)
        self.machine = machine
        self._scheduler = scheduler
        self._counters = counters
        self._traces = traces
        self._metrics = metrics
        self._wake = wake
        self._on_failed = on_failed
        self._generations: dict[int, int] = {}
        self._requested: dict[str, float] = {}
        self._records: dict[int, TraceRecord] = {}
        self.runs_received = 0
        self.bytes_received = 0
        self._counted: dict[int, int] = {}
        self.on_rehello: Callable[[str], None] = lambda node_id: None
        self.on_ready: Callable[[Request], None] = lambda request: None
        """Called with a request whose KV is complete, before the scheduler hears of it (tests)."""
        counters.on_progress = self._progress

    # What the node asks.

    def fetch(self, request: Request) -> None:
        """A request was admitted: get the KV of all but its last prompt token into its pages."""
        remaining = None if request.deadline is None else request.deadline - time.monotonic()
        self.feed(
            Submit(
                request.id,
                list(request.prompt),
                list(request.destination),
                request.priority,
                remaining,
            )
        )

    def cancel(self, request: str) -> None:
        """Its client is gone and its pages are quarantined."""
        self.feed(CancelRequest(request))

    def check_capacity(self, prompt_tokens: int) -> None:
        """Raise NoPeer, or ContextLengthExceeded where no peer can hold the prompt: before any work."""
        nodes = [link.peer.node for link in self.links.values() if not link.closed.is_set()]
        if not nodes:
            raise NoPeer("no prefill node is reachable", retry_after=self.machine.config.retry_after_s)
        limit = max(longest_prompt(node) for node in nodes)
        if prompt_tokens > limit:
            raise ContextLengthExceeded(
                f"prompt has {prompt_tokens} tokens; "
                f"the prefill nodes take prompts of at most {limit} tokens",
                param="prompt",
            )

    # What the machine asks.

    def perform(self, effect: Effect) -> None:
        match effect:
            case ArmSlot(slot, generation, runs):
                self._arm_slot(slot, generation, runs)
            case DisarmSlot(slot, _):
                self._disarm(slot)
            case Send(link, message):
                if isinstance(message, Prefill):
                    self._requesting(link, message)
                self.send(link, message)
            case Ready(request):
                self._ready(request)
            case Failed(request, error):
                self._failed(request, error)
            case PagesSafe(request):
                self._requested.pop(request, None)
                self._scheduler.pages_safe(request)
                self._wake()
            case Fence(link, _):
                self.close_link(link, Fenced(link))
            case Rehello(node_id):
                self.on_rehello(node_id)
            case _:
                raise AssertionError(f"no such effect of the decode machine: {effect!r}")

    def load(self) -> Load:
        return node_load(self._scheduler)

    def _arm_slot(self, slot: int, generation: int, runs: int) -> None:
        self._generations[slot] = generation
        self._counted[slot] = 0
        self._counters.arm(
            slot,
            generation,
            runs,
            on_complete=lambda slot: self.feed(SlotCounted(slot, generation)),
            on_overshoot=lambda slot, count: self.feed(SlotOvershoot(slot, generation, count)),
        )

    def _disarm(self, slot: int) -> None:
        self._counters.disarm(slot)
        self._generations.pop(slot, None)
        self._counted.pop(slot, None)
        self._records.pop(slot, None)

    def _progress(self, slot: int, count: int) -> None:
        generation = self._generations.get(slot)
        if generation is None:
            return
        self.runs_received += count - self._counted[slot]
        self._counted[slot] = count
        record = self._records.get(slot)
        if record is not None:
            record.progress(slot, count, time.monotonic())
        self.feed(SlotProgress(slot, generation, count))

    def _requesting(self, link: int, message: Prefill) -> None:
        """A request is about to be sent: stamp it, and remember which slots are its."""
        now = time.monotonic()
        self._requested.setdefault(message.request, now)
        record = self._traces.get(message.request)
        if record is None:
            return
        record.attempt = message.attempt
        record.peer = self.links[link].peer.node.node_id
        record.mark(Step.REQUESTED, now)
        for imm in message.slots:
            self._records[unpack(imm)[0]] = record

    def on_received(self, link: int, message: Message) -> None:
        if isinstance(message, Accepted | Quiet):
            record = self._traces.get(message.request)
            if record is not None:
                step = Step.ACCEPTED if isinstance(message, Accepted) else Step.QUIET
                record.mark(step, time.monotonic())

    def _ready(self, id: str) -> None:
        now = time.monotonic()
        record = self._traces.get(id)
        if record is not None:
            record.mark(Step.READY, now)
        self._metrics.transferred(now - self._requested.pop(id, now))
        request = self._scheduler.get(id)
        if request is not None:
            self.on_ready(request)
        self._scheduler.received(id, now)
        self._wake()

    def _failed(self, id: str, error: PdserveError) -> None:
        if self._scheduler.end_receiving(id, time.monotonic()):
            self._on_failed(id, error)


def node_load(scheduler: Scheduler) -> Load:
    """A node's load as its peers hear it: what is in the batch and not computed waits too."""
    stats = scheduler.statistics()
    now = time.monotonic()
    return Load(
        queue_age=0.0 if stats.head_arrival is None else max(0.0, now - stats.head_arrival),
        waiting_tokens=stats.waiting_tokens + stats.unplanned_tokens,
        free_pages=stats.pages_free - stats.pages_reserved,
    )
