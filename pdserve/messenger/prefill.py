"""The prefill side's machine: from `Prefill` to pages written layer by layer, and to silence.

Life of a work. It is *offered* to the scheduler, *queued*, and *running* from its first planned chunk on.
When a chunk is planned, before its step reaches the workers, the tables of its writes are made; after that
a tick of the layer counter costs one effect a request and pair of ranks. Several layers at once are caught
up in order. Everything posted, it is *draining*; when every batch has ended locally, `Quiet` says how many
runs were posted for each slot, and the source pages are released.

A cancelled work stops posting at once but can't take back what is under way: it is *cancelling* until its
last batch has ended, and only then says `Quiet`, because until then a write may still fail and make the
number unknown. A failed write is told at once, without a number: the peer will close the port. A lost link
has nobody to tell; the work is *closing* until its batches have ended or its endpoint is closed.

Where a work is: every state but the final ones keeps it in `_works` and in its link's `works`. What it
owns: from QUEUED on the source pages (until `Release`, exactly once), and its batches in `_batches`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pdserve.errors import PdserveError, ProtocolError
from pdserve.messenger.admission import refuse, target
from pdserve.messenger.events import (
    BatchDone,
    CancelCompute,
    ChunkPlanned,
    Closed,
    CloseLink,
    ComputeFailed,
    Enqueue,
    Enqueued,
    Event,
    Key,
    LinkUp,
    PostWrites,
    Refused,
    Release,
    StepEnded,
    Ticked,
)
from pdserve.messenger.facts import NodeFacts
from pdserve.messenger.liveness import Liveness
from pdserve.messenger.machine import LINK_HANDLERS, Machine, PeerLink
from pdserve.messenger.messages import Accepted, Cancel, Failed, Message, Prefill, Quiet, Rejected
from pdserve.messenger.prefill_table import FINAL, TRANSITIONS, Happening, State
from pdserve.messenger.runs import PageMove, TransferPlan, WriteTable, turns


@dataclass(frozen=True)
class PrefillConfig:
    node: NodeFacts
    group: int = 0
    """Which of this node's groups computes for the peers."""
    vocab_size: int = 1 << 32
    """Token ids are below it."""
    heartbeat_s: float = 0.25
    dead_s: float = 2.0
    pause_s: float = 0.5
    """A gap between two calls of `handle` longer than this means that we were paused."""
    retry_after_s: float = 1.0
    story: int = 512


class PrefillLink(PeerLink):
    """A link to a decode node. Once not `up` its endpoint is being closed, and it goes with `Closed`."""

    def __init__(self, event: LinkUp, liveness: Liveness) -> None:
        super().__init__(event, liveness)
        self.works: dict[tuple[str, int], Work] = {}
        self.slots: set[int] = set()
        """Imm bases of its works."""
        self.plans: dict[tuple[int, int], TransferPlan] = {}
        """By destination group and turn."""


class Work:
    """One attempt at one request of a peer."""

    def __init__(self, key: Key, link: PrefillLink, prefill: Prefill, plan: TransferPlan) -> None:
        self.key = key
        self.link = link
        self.prefill = prefill
        self.plan = plan
        self.state = State.OFFERED
        self.next_page = 0
        self.posted = [0] * len(prefill.slots)
        """Runs posted, by segment."""
        self.outstanding: set[int] = set()
        """Batches under way."""
        self.failure: ComputeFailed | None = None


class Chunk:
    """One work's part of one step: by cache group, the tables of its writes."""

    def __init__(self, work: Work, tables: tuple[tuple[WriteTable, ...], ...], last: bool) -> None:
        self.work = work
        self.tables = tables
        self.last = last


class Step:
    """A step under way: layers [0, next_layer) have been posted."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.next_layer = 0


class PrefillMachine(Machine[PrefillLink]):
    """`Prefill` -> `Enqueue` -> `PostWrites` for each layer -> `Quiet` and `Release`."""

    def __init__(self, config: PrefillConfig) -> None:
        super().__init__(config.heartbeat_s, config.dead_s, config.pause_s, config.story)
        self.config = config
        self._geometry = config.node.geometry(config.group)
        self._layers = self._geometry.layers
        self._group_of_layer = self._geometry.group_of_layer
        self._segment_pages = config.node.segment_tokens // config.node.page_size
        self._turns = turns(self._geometry)
        self._turn = 0
        self._works: dict[Key, Work] = {}
        self._batches: dict[int, Work] = {}
        self._next_batch = 0
        self._steps: dict[int, Step] = {}
        self._ticks = 0

    @property
    def idle(self) -> bool:
        """No work and no outstanding batch."""
        return not self._works and not self._batches

    # ---------------------------------------------------------------- events

    def _told(self, link: PrefillLink, message: Message) -> None:
        if isinstance(message, Prefill):
            self._take(link, message)
        elif isinstance(message, Cancel):
            work = link.works.get((message.request, message.attempt))
            if work is None:
                # It has ended, and the peer has been told or will be.
                self.counters["stale_messages"] += 1
            else:
                self._apply(work, Happening.CANCELLED)
        else:
            self.counters["breaches"] += 1
            self._lose(link, ProtocolError(f"{link.node.node_id} sent a {type(message).__name__}"))

    def _take(self, link: PrefillLink, prefill: Prefill) -> None:
        if (prefill.request, prefill.attempt) in link.works:
            # Answering `Rejected` would call the first one quiet.
            self.counters["breaches"] += 1
            self._lose(link, ProtocolError(f"{link.node.node_id} sent attempt {prefill.attempt} twice"))
            return
        if self.draining is not None:
            self._say_rejected(link, prefill, "draining", self.draining, self.config.retry_after_s)
            return
        refusal = refuse(
            prefill,
            self.config.node,
            link.node,
            self._geometry.num_pages - 1,
            vocab_size=self.config.vocab_size,
            slots_in_use=link.slots,
        )
        if refusal is not None:
            self._say_rejected(link, prefill, refusal.code, refusal.reason, None)
            return
        key = Key(link.link, prefill.request, prefill.attempt)
        work = Work(key, link, prefill, self._plan_to(link, prefill.group))
        self._works[key] = work
        link.works[prefill.request, prefill.attempt] = work
        link.slots.update(prefill.slots)
        self._effects.append(
            Enqueue(
                key,
                prefill.tokens,
                target(prefill),
                prefill.priority,
                prefill.remaining,
                prefill.trace,
                prefill.salt,
            )
        )

    def _say_rejected(
        self, link: PrefillLink, prefill: Prefill, code: str, reason: str, retry_after: float | None
    ) -> None:
        self._send(link, Rejected(prefill.request, prefill.attempt, code, reason[:1024], retry_after))

    def _plan_to(self, link: PrefillLink, group: int) -> TransferPlan:
        """The next turn's plan: replicas serve in turn."""
        self._turn = (self._turn + 1) % self._turns
        plan = link.plans.get((group, self._turn))
        if plan is None:
            plan = TransferPlan(self._geometry, link.node.geometry(group), self._turn, group)
            link.plans[group, self._turn] = plan
        return plan

    def _enqueued(self, event: Enqueued) -> None:
        self._apply_to(event.key, Happening.ENQUEUED, event)

    def _refused(self, event: Refused) -> None:
        self._apply_to(event.key, Happening.REFUSED, event)

    def _chunk_planned(self, event: ChunkPlanned) -> None:
        self._apply_to(event.key, Happening.PLANNED, event)

    def _compute_failed(self, event: ComputeFailed) -> None:
        self._apply_to(event.key, Happening.COMPUTE_FAILED, event)

    def _batch_done(self, event: BatchDone) -> None:
        work = self._batches.pop(event.batch, None)
        if work is None:
            self.counters["ignored_events"] += 1
            return
        work.outstanding.discard(event.batch)
        failed = event.error is not None
        self._apply(work, Happening.BATCH_FAILED if failed else Happening.BATCH_DONE, event)

    def _ticked(self, event: Ticked) -> None:
        self._ticks = max(self._ticks, event.value)
        for number in sorted(self._steps):
            reached = self._ticks - number * (self._layers + 1)
            if reached <= 0:
                return
            step = self._steps[number]
            end = min(reached, self._layers + 1)
            for layer in range(step.next_layer, end):
                step.next_layer = layer + 1
                for chunk in step.chunks:
                    self._post(chunk, layer)
            if end > self._layers:
                del self._steps[number]

    def _step_ended(self, event: StepEnded) -> None:
        self._ticked(Ticked((event.step + 1) * (self._layers + 1)))

    def _closed(self, event: Closed) -> None:
        link = self._links.pop(event.link, None)
        if link is None:
            self.counters["ignored_events"] += 1
            return
        if link.up:
            self._give_up(link)
        for work in list(link.works.values()):
            self._apply(work, Happening.CLOSED)

    # ---------------------------------------------------------------- links

    def _make_link(self, event: LinkUp, liveness: Liveness) -> PrefillLink:
        if event.link in self._links:
            raise ValueError(f"link {event.link:016x} is up already")
        return PrefillLink(event, liveness)

    def _lose(self, link: PrefillLink, error: PdserveError) -> None:
        self._effects.append(CloseLink(link.link, str(error)))
        self._give_up(link)

    def _give_up(self, link: PrefillLink) -> None:
        link.up = False
        for work in list(link.works.values()):
            self._apply(work, Happening.LINK_LOST)

    def _active_on(self, link: PrefillLink) -> int:
        return len(link.works)

    # ---------------------------------------------------------------- posting

    def _make_chunk(self, work: Work, event: ChunkPlanned) -> Chunk:
        """Pages of one work that a step completes, as write tables of their first layers."""
        if event.first_page != work.next_page:
            raise ValueError(
                f"{work.key}: page {event.first_page} planned, but page {work.next_page} is next"
            )
        end = work.next_page + len(event.pages)
        if end > len(work.prefill.pages) or (event.last and end != len(work.prefill.pages)):
            raise ValueError(f"{work.key}: planned to page {end} of {len(work.prefill.pages)}")
        moves = []
        for index, src_page in enumerate(event.pages, work.next_page):
            segment = index // self._segment_pages
            moves.append(PageMove(src_page, work.prefill.pages[index], work.prefill.slots[segment], segment))
        work.next_page = end
        return Chunk(work, work.plan.tables(moves), event.last)

    def _post(self, chunk: Chunk, layer: int) -> None:
        """Layer `layer` of a step is in the arena: write this chunk's part. Past the last layer: the end."""
        work = chunk.work
        if work.state is not State.RUNNING:
            return
        if layer == self._layers:
            if chunk.last:
                self._apply(work, Happening.POSTED)
            return
        group, index = self._group_of_layer[layer]
        for table in chunk.tables[group]:
            self._next_batch += 1
            batch = self._next_batch
            self._batches[batch] = work
            work.outstanding.add(batch)
            for segment, runs in table.posted.items():
                work.posted[segment] += runs
            src_shift, dst_shift = index * table.src_stride, index * table.dst_stride
            self._effects.append(
                PostWrites(work.key.link, work.key, batch, layer, table, src_shift, dst_shift)
            )

    # ---------------------------------------------------------------- actions of the table

    def _apply_to(self, key: Key, happening: Happening, detail: Any) -> None:
        work = self._works.get(key)
        if work is None:
            self.counters["ignored_events"] += 1
        else:
            self._apply(work, happening, detail)

    def _apply(self, work: Work, happening: Happening, detail: Any = None) -> None:
        rule = TRANSITIONS[work.state, happening]
        before = work.state
        getattr(self, rule.action)(work, detail)
        if work.state not in rule.to:
            raise AssertionError(f"{before} with {happening} led to {work.state}, which is not in {rule.to}")

    def _accept(self, work: Work, event: Enqueued) -> None:
        work.state = State.QUEUED
        self._send(work.link, Accepted(work.key.request, work.key.attempt, event.position))

    def _reject(self, work: Work, event: Refused) -> None:
        self._say_rejected(work.link, work.prefill, event.code, event.reason, event.retry_after)
        self._forget(work, State.REFUSED)

    def _withdraw(self, work: Work, _: Any) -> None:
        work.state = State.WITHDRAWN

    def _orphan(self, work: Work, _: Any) -> None:
        work.state = State.ORPHANED

    def _plan(self, work: Work, event: ChunkPlanned) -> None:
        work.state = State.RUNNING
        chunk = self._make_chunk(work, event)
        reached = min(self._ticks - event.step * (self._layers + 1), self._layers + 1)
        step = self._steps.get(event.step)
        if step is None and reached <= self._layers:
            step = self._steps[event.step] = Step()
            step.next_layer = max(0, reached)
        if step is not None:
            step.chunks.append(chunk)
        # Told late, after the step has begun to tick: nothing is lost.
        for layer in range(reached if step is None else step.next_layer):
            self._post(chunk, layer)

    def _finish(self, work: Work, _: Any) -> None:
        work.state = State.DRAINING
        self._check_quiet(work, None)

    def _cancel(self, work: Work, _: Any) -> None:
        self._effects.append(CancelCompute(work.key))
        work.state = State.CANCELLING
        self._check_quiet(work, None)

    def _fail_compute(self, work: Work, event: ComputeFailed) -> None:
        """The scheduler has dropped it; what was posted is known once the batches have ended."""
        work.failure = event
        work.state = State.CANCELLING
        self._check_quiet(work, None)

    def _fail_write(self, work: Work, event: BatchDone) -> None:
        """How many runs were posted is unknown from here on; the peer is told at once."""
        if work.state is State.RUNNING:
            self._effects.append(CancelCompute(work.key))
        code, reason = getattr(event.error, "code", "fabric_error"), str(event.error)
        self._send(work.link, Failed(work.key.request, work.key.attempt, code, reason[:1024], None))
        work.state = State.FAILING
        self._check_released(work, None)

    def _lose_work(self, work: Work, _: Any) -> None:
        if work.state in (State.ORPHANED, State.QUEUED, State.RUNNING):
            self._effects.append(CancelCompute(work.key))
        work.state = State.CLOSING
        self._check_released(work, None)

    def _check_quiet(self, work: Work, _: Any) -> None:
        if work.outstanding:
            return
        request, attempt, failure = work.key.request, work.key.attempt, work.failure
        if failure is None:
            self._send(work.link, Quiet(request, attempt, work.posted))
        else:
            reason = failure.reason[:1024]
            self._send(
                work.link, Failed(request, attempt, failure.code, reason, work.posted, failure.retry_after)
            )
        self._release(work, None)

    def _check_released(self, work: Work, _: Any) -> None:
        if not work.outstanding:
            self._release(work, None)

    def _release(self, work: Work, _: Any) -> None:
        self._effects.append(Release(work.key))
        self._forget(work, State.RELEASED)

    def _forget(self, work: Work, state: State) -> None:
        work.state = state
        for batch in work.outstanding:
            del self._batches[batch]
        work.outstanding.clear()
        del self._works[work.key]
        del work.link.works[work.key.request, work.key.attempt]
        work.link.slots.difference_update(work.prefill.slots)

    def _ignore(self, work: Work, _: Any) -> None:
        """Changes nothing."""

    def _impossible(self, work: Work, _: Any) -> None:
        raise AssertionError(f"work {work.key} is {work.state}")

    # ---------------------------------------------------------------- looking in

    def statistics(self) -> dict[str, int | float]:
        """Gauges (all zero but `links_up` when idle) and counters."""
        works = self._works.values()
        states = {f"works_{state.value}": 0 for state in State if state not in FINAL}
        for work in works:
            states[f"works_{work.state.value}"] += 1
        return {
            **states,
            "batches_outstanding": len(self._batches),
            "batches_posted": self._next_batch,
            "steps_under_way": len(self._steps),
            "ticks": self._ticks,
            "links_up": sum(link.up for link in self._links.values()),
            "links_closing": sum(not link.up for link in self._links.values()),
            "pauses": self._time.pauses,
            **self.counters,
        }

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold."""
        outstanding = {batch for work in self._works.values() for batch in work.outstanding}
        assert outstanding == set(self._batches), "batches without a work, or the reverse"
        for key, work in self._works.items():
            assert work.link.works[key.request, key.attempt] is work, f"{key} is not on its link"
            if work.state in (State.ORPHANED, State.CLOSING):
                assert not work.link.up, f"{key} is {work.state} on a link that is up"
            else:
                assert work.link.up, f"{key} is {work.state} on a lost link"
        for link in self._links.values():
            slots = [slot for work in link.works.values() for slot in work.prefill.slots]
            assert len(slots) == len(link.slots), "slots of ended works"
            assert set(slots) == link.slots, "slots of ended works"

    _handlers: ClassVar[Mapping[type[Event], str]] = {
        **LINK_HANDLERS,
        Enqueued: "_enqueued",
        Refused: "_refused",
        ChunkPlanned: "_chunk_planned",
        Ticked: "_ticked",
        StepEnded: "_step_ended",
        ComputeFailed: "_compute_failed",
        BatchDone: "_batch_done",
        Closed: "_closed",
    }
