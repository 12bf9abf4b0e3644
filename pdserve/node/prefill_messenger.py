"""Steps 4, 6 and 7: the prefill side's messenger, as the effects of `messenger.prefill` on a real fabric."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.events import Event as EngineEvent
from pdserve.engine.events import Expired, Scheduled
from pdserve.engine.scheduler import Scheduler
from pdserve.errors import FabricError, PdserveError
from pdserve.fabric import WriteTable
from pdserve.messenger.events import (
    BatchDone,
    CancelCompute,
    ChunkPlanned,
    Closed,
    CloseLink,
    ComputeFailed,
    Effect,
    Enqueue,
    Enqueued,
    Key,
    PostWrites,
    Refused,
    Release,
    Send,
    StepEnded,
    Ticked,
)
from pdserve.messenger.messages import Accepted, Failed, Load, Quiet
from pdserve.messenger.prefill import PrefillMachine
from pdserve.node.decode_messenger import node_load
from pdserve.node.messenger import MessengerShell
from pdserve.node.shell import Crash, Spawn
from pdserve.observe.trace import Step, TraceRecord, TraceStore


@dataclass(slots=True)
class _Sending:
    """What the shell knows of one accepted request beside its key: for traces alone."""

    record: TraceRecord
    chunk: int = 0
    layer: int = -1
    posted_at: float | None = None


@dataclass(slots=True)
class _Native:
    """A write table as the fabric wants it, and how many bytes it moves."""

    table: WriteTable
    length: int


class PrefillMessenger(MessengerShell):
    """Takes decode nodes' requests to the scheduler and sends layers as they are computed."""

    def __init__(
        self,
        machine: PrefillMachine,
        scheduler: Scheduler,
        traces: TraceStore,
        *,
        crash: Crash,
        spawn: Spawn,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(machine, crash, spawn)
        self.machine = machine
        self._scheduler = scheduler
        self._traces = traces
        self._wake = wake
        self._keys: dict[str, Key] = {}
        self._sending: dict[Key, _Sending] = {}
        self.bytes_sent = 0
        self.runs_sent = 0

    # What the engine loop tells.

    def scheduled(self, scheduled: Scheduled) -> None:
        """A step is about to go to the worker."""
        now = time.monotonic()
        for chunk in scheduled.chunks:
            key = self._keys[chunk.id]
            if key in self._sending:
                self._sending[key].record.mark(Step.SCHEDULED, now)
            self.feed(ChunkPlanned(key, scheduled.plan.step, chunk.first_page, chunk.pages, chunk.last))

    def ticked(self, value: int) -> None:
        """The worker's layer counter reads `value`."""
        self.feed(Ticked(value))

    def step_ended(self, step: int) -> None:
        self.feed(StepEnded(step))

    def engine_event(self, event: EngineEvent) -> None:
        """What became of a request in the scheduler, as far as the machine does not know it already."""
        if isinstance(event, Expired):
            key = self._keys[event.id]
            reason = f"waited {event.waited:.1f} s for its turn, longer than its client does"
            self.feed(ComputeFailed(key, "deadline", reason))

    def fail_all(self, error: PdserveError) -> None:
        """The worker is gone: nothing that is not computed yet will be."""
        for key in list(self._keys.values()):
            self.feed(ComputeFailed(key, error.code, error.message, error.retry_after))

    # What the machine asks.

    def perform(self, effect: Effect) -> None:
        match effect:
            case PostWrites():
                self._post(effect)
            case Send(link, message):
                if isinstance(message, Accepted | Quiet | Failed):
                    self._answering(Key(link, message.request, message.attempt), message)
                self.send(link, message)
            case Enqueue():
                self._enqueue(effect)
            case CancelCompute(key):
                self._scheduler.cancel(_id(key), time.monotonic())
                self._wake()
            case Release(key):
                self._scheduler.release(_id(key), time.monotonic())
                self._keys.pop(_id(key), None)
                self._sending.pop(key, None)  # still there where its link was lost: nobody was answered
                self._wake()
            case CloseLink(link, _):
                self.close_link(link, Closed(link))
            case _:
                raise AssertionError(f"no such effect of the prefill machine: {effect!r}")

    def load(self) -> Load:
        return node_load(self._scheduler)

    def _enqueue(self, effect: Enqueue) -> None:
        now = time.monotonic()
        id = _id(effect.key)
        deadline = None if effect.remaining is None else now + effect.remaining
        try:
            self._scheduler.submit(
                id,
                effect.tokens[: effect.target],
                None,
                0,
                priority=effect.priority,
                deadline=deadline,
                now=now,
            )
        except PdserveError as error:
            self.feed(Refused(effect.key, error.code, error.message, error.retry_after))
            return
        self._keys[id] = effect.key
        record = self._traces.begin(effect.key.request, attempt=effect.key.attempt)
        record.prompt_tokens = len(effect.tokens)
        record.kv_pages = self._scheduler.config.pages_for(effect.target)
        self._sending[effect.key] = _Sending(record)
        self.feed(Enqueued(effect.key, self._scheduler.waiting - 1))
        self._wake()

    def _post(self, effect: PostWrites) -> None:
        """Hand one layer's runs to the fabric, in one native call."""
        table = effect.table
        native = table.native
        if not isinstance(native, _Native):
            native = table.native = _Native(WriteTable(table.rows), sum(table.rows[2::4]))
        seen = time.monotonic()
        link = self.links[effect.link]
        batch = effect.batch
        try:
            writes = link.port.write_pages(
                link.region,
                link.remote(table.dst_group, table.dst_rank),
                native.table,
                src_shift=effect.src_shift,
                dst_shift=effect.dst_shift,
            )
        except FabricError as error:
            self.feed(BatchDone(batch, error))
            return
        writes.add_done_callback(lambda error: self.feed(BatchDone(batch, error)))
        self.bytes_sent += native.length
        self.runs_sent += table.runs
        self._posted(effect, seen, native.length)

    def _posted(self, effect: PostWrites, seen: float, length: int) -> None:
        sending = self._sending.get(effect.key)
        if sending is None:
            return
        if effect.layer < sending.layer:
            sending.chunk += 1
        sending.layer = effect.layer
        now = time.monotonic()
        record = sending.record
        record.layer_ready(sending.chunk, effect.layer, seen)
        record.layer_posted(sending.chunk, effect.layer, now, runs=effect.table.runs, length=length)
        sending.posted_at = now

    def _answering(self, key: Key, message: Accepted | Quiet | Failed) -> None:
        now = time.monotonic()
        accepted = isinstance(message, Accepted)
        sending = self._sending.get(key) if accepted else self._sending.pop(key, None)
        if sending is None:
            return
        if isinstance(message, Accepted):
            sending.record.mark(Step.ACCEPTED, now)
        else:
            if sending.posted_at is not None:
                sending.record.mark(Step.POSTED, sending.posted_at)
            sending.record.mark(Step.QUIET, now)
            if isinstance(message, Failed):
                sending.record.error = message.reason


def _id(key: Key) -> str:
    """The scheduler's name of a key."""
    return f"{key.link:016x}/{key.attempt}/{key.request}"
