"""The state machine that drives the scheduler: node, worker and messenger in one, everything at any time.

The tests are in test_scheduler_machine.py.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pdserve.engine.events import Expired, PrefillComputed, Scheduled, TokenEvent
from pdserve.engine.limits import Role, SchedulerConfig
from pdserve.engine.pages import PageState
from pdserve.engine.plan import StepResult, Work
from pdserve.engine.request import Phase, Request
from pdserve.engine.sampling import SamplingParams
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.statistics import Statistics
from pdserve.errors import ContextLengthExceeded, Overloaded
from tests.engine.model_worker import STOP, ModelWorker, PersistentBatch

PICK = st.integers(0, 1 << 16)
ZERO_WHEN_IDLE = [
    name
    for name in Statistics.__struct_fields__
    if not name.endswith("_total") and name not in ("pages_free", "head_arrival")
]


class SchedulerMachine(RuleBasedStateMachine):
    """Plays node, worker and messenger. What is expected of a request is decided when it is submitted."""

    role: Role

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        num_pages=st.integers(3, 24),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(0, 24),
        max_model_len=st.integers(4, 40),
        max_waiting=st.integers(1, 6),
        steps_in_flight=st.integers(1, 3),
        max_receiving=st.sampled_from([None, 1, 3]),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        budget: int,
        max_model_len: int,
        max_waiting: int,
        steps_in_flight: int,
        max_receiving: int | None,
    ) -> None:
        least = page_size if self.role is Role.PREFILL else max_num_seqs
        self.config = SchedulerConfig(
            role=self.role,
            page_size=page_size,
            num_pages=num_pages,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=least + budget,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            steps_in_flight=steps_in_flight,
            max_receiving=max_receiving,
        )
        self.scheduler = Scheduler(self.config)
        self.worker = ModelWorker(page_size, num_pages, max_num_seqs)
        self.shadow = PersistentBatch(page_size, max_num_seqs)  # plans applied when published, not when run
        self.to_run: deque[Scheduled] = deque()
        self.to_report: deque[tuple[Scheduled, StepResult]] = deque()
        self.named: dict[int, dict[int, list[int]]] = {}  # unfinished step -> seq -> pages it names
        self.now = 0.0
        self.requests: list[Request] = []
        self.admitted: list[int] = []
        self.expected: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.writing: dict[str, Request] = {}  # a peer may write
        self.sendable: dict[str, Request] = {}  # prefill-only, not released

    # --- helpers

    def pick(self, of: list[Request] | dict[str, Request], pick: int) -> Request | None:
        items = list(of.values()) if isinstance(of, dict) else of
        return items[pick % len(items)] if items else None

    def in_phase(self, *phases: Phase) -> list[Request]:
        return [request for request in self.requests if request.phase in phases]

    # --- requests

    @rule(
        shape=st.sampled_from(["one", "page-1", "page", "page+1", "full", "any"]),
        any_length=st.integers(1, 44),
        output=st.sampled_from([1, 2, 3, 7, 12, 99]),
        oversize=st.sampled_from([False] * 7 + [True]),
        eos_at=st.none() | st.integers(0, 8),
        min_tokens=st.sampled_from([0, 0, 0, 1, 3]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        patience=st.none() | st.floats(0.5, 20),
    )
    def submit(
        self,
        shape: str,
        any_length: int,
        output: int,
        oversize: bool,
        eos_at: int | None,
        min_tokens: int,
        priority: int,
        patience: float | None,
    ) -> None:
        config, page = self.config, self.config.page_size
        generate = self.role is not Role.PREFILL
        capacity = (config.num_pages - 1) * page
        full = min(config.max_model_len - generate, capacity)
        lengths = {"one": 1, "page-1": page - 1, "page": page, "page+1": page + 1, "full": full}
        length = max(1, lengths.get(shape, any_length))
        max_tokens = output if generate else 0
        if not oversize:
            length = min(length, full)
            max_tokens = min(max_tokens, config.max_model_len - length, capacity - length + 1)
        positions = length + max(0, max_tokens - 1)
        fits = length + max_tokens <= config.max_model_len and length + generate <= config.max_model_len
        fits = fits and -(-positions // page) <= config.num_pages - 1
        id = f"r{len(self.requests)}"
        sampling = SamplingParams(min_tokens=min_tokens, stop_token_ids=(STOP,)) if generate else None
        deadline = None if patience is None else self.now + patience
        full_queue = len(self.in_phase(Phase.WAITING)) >= config.max_waiting
        before = self.scheduler.statistics()
        prompt = [1000 + i for i in range(length)]

        def call() -> Request:
            return self.scheduler.submit(
                id, prompt, sampling, max_tokens, priority=priority, deadline=deadline, now=self.now
            )

        assert (max_tokens <= self.scheduler.room(length)) == fits or not generate
        if not fits:
            with pytest.raises(ContextLengthExceeded):
                call()
        elif full_queue:
            with pytest.raises(Overloaded) as caught:
                call()
            assert caught.value.retry_after is not None
            assert caught.value.retry_after >= 1
            assert self.scheduler.statistics().rejected_total == before.rejected_total + 1
        else:
            request = call()
            assert all(request.seq > other.seq for other in self.requests)
            self.requests.append(request)
            self.got[id] = []
            if eos_at is not None:
                self.worker.eos_at[request.seq] = eos_at
            self.expected[id] = expected_output(max_tokens, eos_at, min_tokens)
            if not generate:
                self.sendable[id] = request
            return
        assert self.scheduler.get(id) is None

    @rule()
    def admit(self) -> None:
        queue = sorted(self.in_phase(Phase.WAITING), key=lambda r: (r.priority, r.seq))
        receiving = self.scheduler.admit(self.now)
        left = [request for request in queue if request.phase is not Phase.WAITING]
        assert left == queue[: len(left)], "somebody overtook"
        if self.role is not Role.DECODE:
            self.admitted += [request.seq for request in left]
        assert receiving == [request for request in left if request.phase is Phase.RECEIVING]
        for request in receiving:
            assert self.role is Role.DECODE
            assert len(request.destination) == self.config.pages_for(len(request.prompt) - 1) >= 1
            self.writing[request.id] = request
        if len(left) < len(queue):
            self.head_does_not_fit(queue[len(left)])

    def head_does_not_fit(self, head: Request) -> None:
        gauges = self.scheduler.statistics()
        need = self.config.pages_for_request(len(head.prompt), head.max_tokens)
        pages_lack = need > gauges.pages_free - gauges.pages_reserved
        if self.role is Role.DECODE:
            place_lacks = gauges.receiving + gauges.ready >= self.config.receiving_limit
        else:
            place_lacks = gauges.running >= self.config.max_num_seqs
        assert pages_lack or place_lacks, "admission stopped without a reason"

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        if (request := self.pick(self.requests, pick)) is None:
            return
        before = request.phase
        after = self.scheduler.cancel(request.id, self.now)
        assert after is request.phase
        assert after is {
            Phase.RECEIVING: Phase.QUARANTINED,
            Phase.QUARANTINED: Phase.QUARANTINED,
            Phase.RUNNING: Phase.SENDING if request.prefill_only else Phase.FINISHED,
            Phase.SENDING: Phase.SENDING,
        }.get(before, Phase.FINISHED)
        if before is not Phase.FINISHED:
            self.ended.setdefault(request.id, "cancelled")
        if before is Phase.WAITING:
            self.sendable.pop(request.id, None)

    @rule(by=st.floats(0, 5))
    def pass_time(self, by: float) -> None:
        self.now += by
        deadline = self.scheduler.next_deadline()
        late = {
            r.id for r in self.in_phase(Phase.WAITING) if r.deadline is not None and r.deadline <= self.now
        }
        assert bool(late) == (deadline is not None and deadline <= self.now)
        for event in self.scheduler.expire(self.now):
            assert isinstance(event, Expired)
            late.remove(event.id)
            assert event.waited >= 0
            self.ended[event.id] = "expired"
            self.sendable.pop(event.id, None)
        assert not late

    # --- the decode side's messenger

    @precondition(lambda self: self.role is Role.DECODE)
    @rule(pick=PICK, position=PICK)
    def peer_writes(self, pick: int, position: int) -> None:
        """At any time until there is proof of the contrary, also after a cancel."""
        if (request := self.pick(self.writing, pick)) is not None:
            self.worker.write(request.seq, request.pages, position % (len(request.prompt) - 1))

    @precondition(lambda self: self.role is Role.DECODE)
    @rule(pick=PICK)
    def receive(self, pick: int) -> None:
        """The last write lands; the node may have cancelled in the same moment."""
        if (request := self.pick(self.writing, pick)) is None:
            return
        for position in range(len(request.prompt) - 1):
            self.worker.write(request.seq, request.pages, position)
        wanted = request.phase is Phase.RECEIVING
        del self.writing[request.id]
        assert self.scheduler.received(request.id, self.now) is wanted
        assert request.phase in ((Phase.READY, Phase.RUNNING) if wanted else (Phase.FINISHED,))

    @precondition(lambda self: self.role is Role.DECODE)
    @rule(pick=PICK)
    def give_up(self, pick: int) -> None:
        if (request := self.pick(self.writing, pick)) is None:
            return
        wanted = request.phase is Phase.RECEIVING
        assert self.scheduler.end_receiving(request.id, self.now) is wanted
        assert request.phase is Phase.QUARANTINED
        self.ended.setdefault(request.id, "receive_failed")

    @precondition(lambda self: self.role is Role.DECODE)
    @rule(pick=PICK)
    def prove_safe(self, pick: int) -> None:
        if (request := self.pick(self.in_phase(Phase.QUARANTINED), pick)) is not None:
            del self.writing[request.id]
            self.scheduler.pages_safe(request.id)
            assert request.phase is Phase.FINISHED

    @rule(pick=PICK)
    def late_news(self, pick: int) -> None:
        """Whatever is said of a request that nobody knows any more is ignored."""
        if (request := self.pick(self.in_phase(Phase.FINISHED), pick)) is not None:
            self.scheduler.pages_safe(request.id)
            self.scheduler.release(request.id, self.now)
            assert not self.scheduler.received(request.id, self.now)
            assert not self.scheduler.end_receiving(request.id, self.now)
            assert self.scheduler.cancel(request.id, self.now) is Phase.FINISHED

    # --- the prefill side's messenger

    @precondition(lambda self: self.role is Role.PREFILL)
    @rule(pick=PICK)
    def read_source(self, pick: int) -> None:
        """Until it is released, whatever the worker has computed of a prompt is there to be sent."""
        request = self.pick(self.sendable, pick)
        if request is not None and (row := self.worker.batch.rows.get(request.seq)) is not None:
            self.worker.expect(request.seq, row.pages, row.computed or 0)
        if request is not None and request.phase is Phase.SENDING:
            self.worker.expect(request.seq, request.pages, request.computed)

    @precondition(lambda self: self.role is Role.PREFILL)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        """In any phase: a link that is lost releases what has hardly begun."""
        if (request := self.pick(self.sendable, pick)) is None:
            return
        unfinished = request.scheduled < len(request.prompt)
        del self.sendable[request.id]
        self.scheduler.release(request.id, self.now)
        assert request.phase is Phase.FINISHED
        if unfinished:
            self.ended.setdefault(request.id, "cancelled")

    # --- steps

    @rule()
    def publish(self) -> None:
        running = self.in_phase(Phase.RUNNING)
        decoding = {r.seq: r for r in running if not r.prefill_only and r.scheduled >= len(r.prompt)}
        prefilling = {r.seq: r for r in running if r.scheduled < len(r.prompt)}
        full = len(self.named) >= self.config.steps_in_flight
        scheduled = self.scheduler.schedule(self.now)
        due = {seq for seq, r in decoding.items() if r.phase is Phase.RUNNING}
        if scheduled is None:
            could_decode = [r for r in decoding.values() if r.samples_planned < r.max_tokens]
            assert full or (not could_decode and not prefilling)
            assert full or self.named or not self.shadow.rows, "the worker was not told"
            return
        assert not full
        plan = scheduled.plan
        was_idle = not self.named
        self.shadow.apply(plan)
        self.named[plan.step] = {work.seq: list(self.shadow.rows[work.seq].pages) for work in plan.work}
        self.to_run.append(scheduled)
        assert sum(work.count for work in plan.work) <= self.config.max_num_batched_tokens
        self.decode_tokens_come_first(plan.work, due)
        self.chunks_in_order(plan.work, prefilling)
        self.chunks_are_whole_pages(scheduled)
        if not plan.work:
            assert plan.finished
            assert was_idle

    def decode_tokens_come_first(self, work: list[Work], due: set[int]) -> None:
        planned = {item.seq for item in work}
        by_seq = {request.seq: request for request in self.requests}
        for seq in due - planned:
            request = by_seq[seq]
            assert request.samples_planned == request.max_tokens, "a sequence missed a step"
        prompts_began = False
        for item in work:
            request = by_seq[item.seq]
            decode = self.role is Role.DECODE or item.start >= len(request.prompt)
            assert not (decode and prompts_began), "a chunk went before a decode token"
            prompts_began = prompts_began or not decode
            if not request.prefill_only:
                assert item.sample == (item.start + item.count >= len(request.prompt))
            else:
                assert not item.sample

    def chunks_in_order(self, work: list[Work], prefilling: dict[int, Request]) -> None:
        counts = {item.seq: item.count for item in work}
        starved = False
        for seq in self.admitted:
            if seq in prefilling:
                got = counts.get(seq, 0)
                assert not (starved and got), "a later prompt overtook"
                starved = starved or prefilling[seq].scheduled < len(prefilling[seq].prompt)

    def chunks_are_whole_pages(self, scheduled: Scheduled) -> None:
        page = self.config.page_size
        assert scheduled.plan.send == bool(scheduled.chunks)
        if self.role is not Role.PREFILL:
            assert not scheduled.chunks
            return
        assert len(scheduled.chunks) == len(scheduled.plan.work)
        for chunk, work in zip(scheduled.chunks, scheduled.plan.work, strict=True):
            request = self.scheduler.get(chunk.id)
            assert request is not None
            assert request.seq == work.seq
            end = work.start + work.count
            assert work.start % page == 0
            assert end % page == 0 or end == len(request.prompt)
            assert chunk.last == (end == len(request.prompt))
            assert chunk.first_page == work.start // page
            assert chunk.pages == request.pages[chunk.first_page : -(-end // page)] != []

    @precondition(lambda self: self.to_run)
    @rule()
    def run(self) -> None:
        scheduled = self.to_run.popleft()
        self.to_report.append((scheduled, self.worker.run(scheduled.plan)))

    @precondition(lambda self: self.to_report)
    @rule()
    def complete(self) -> None:
        _, result = self.to_report.popleft()
        del self.named[result.step]
        for event in self.scheduler.complete(result, self.now):
            if isinstance(event, PrefillComputed):
                assert event.id not in self.ended
                self.ended[event.id] = "computed"
            else:
                assert isinstance(event, TokenEvent)
                assert event.id not in self.ended
                self.got[event.id].append(event.token)
                if event.finish_reason is not None:
                    self.ended[event.id] = event.finish_reason

    @rule(times=st.integers(1, 6))
    def turn(self, times: int) -> None:
        """What a node's loop does, so that random runs get far into a request's life."""
        for _ in range(times):
            self.admit()
            self.publish()
            if self.to_run:
                self.run()
            if self.to_report and len(self.named) >= self.config.steps_in_flight:
                self.complete()

    # --- what holds always

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        gauges = self.scheduler.statistics()
        for name, phase in (
            ("waiting", Phase.WAITING),
            ("receiving", Phase.RECEIVING),
            ("ready", Phase.READY),
            ("running", Phase.RUNNING),
            ("sending", Phase.SENDING),
            ("quarantined", Phase.QUARANTINED),
        ):
            assert getattr(gauges, name) == len(self.in_phase(phase))
        assert gauges.steps_in_flight == len(self.named)

    @invariant()
    def plans_tell_everything(self) -> None:
        """The batch that plans alone describe is the scheduler's own view."""
        if not hasattr(self, "scheduler"):
            return
        announced = {r.seq: r for r in self.requests if r.phase is Phase.RUNNING and r.announced}
        ended = {r.seq for r in self.requests if r.phase in (Phase.FINISHED, Phase.SENDING)}
        assert announced.keys() == self.shadow.rows.keys() - ended
        assert len(self.shadow.rows.keys() & ended) == self.scheduler.statistics().untold
        for seq, request in announced.items():
            row = self.shadow.rows[seq]
            assert row.pages == request.pages
            assert row.computed == request.scheduled
            assert row.tokens == list(request.prompt)

    @invariant()
    def nothing_named_is_reused(self) -> None:
        """A page that an unfinished step names is neither free nor anybody else's."""
        if not hasattr(self, "scheduler"):
            return
        owner = {page: r.seq for r in self.requests if r.phase is not Phase.FINISHED for page in r.pages}
        for rows in self.named.values():
            for seq, pages in rows.items():
                for page in pages:
                    assert owner.get(page, seq) == seq
                    assert self.scheduler._pages.state(page) in (PageState.HELD, PageState.PENDING)
        for request in self.writing.values():
            for page in request.destination:
                assert owner.get(page) == request.seq, "a peer may still write here"

    @invariant()
    def tokens_are_as_expected(self) -> None:
        for id, tokens in getattr(self, "got", {}).items():
            expected = self.expected[id]
            assert tokens == expected[: len(tokens)]
            if self.ended.get(id) in ("stop", "length"):
                assert tokens == expected
                request = next(request for request in self.requests if request.id == id)
                assert request.sampling is not None
                may_stop = tokens[-1] == STOP and len(tokens) > request.sampling.min_tokens
                assert self.ended[id] == ("stop" if may_stop else "length")

    # --- the end

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if self.scheduler.idle:
                break
            self.admit()
            self.publish()
            if self.to_run:
                self.run()
            if self.to_report:
                self.complete()
            if self.writing:
                phase = next(iter(self.writing.values())).phase
                self.receive(0) if phase is Phase.RECEIVING else self.prove_safe(0)
            for request in self.in_phase(Phase.SENDING):
                self.scheduler.release(request.id, self.now)
                self.sendable.pop(request.id, None)
        assert self.scheduler.idle, "somebody waits for ever"
        self.all_agree()
        gauges = self.scheduler.statistics()
        assert gauges.pages_free == self.config.num_pages - 1
        for name in ZERO_WHEN_IDLE:
            assert getattr(gauges, name) == 0, name
        assert not self.shadow.rows
        assert not self.worker.batch.rows
        assert self.ended.keys() == {request.id for request in self.requests}
        ends = list(self.ended.values())
        assert gauges.submitted_total == len(ends)
        assert gauges.finished_stop_total == ends.count("stop")
        assert gauges.finished_length_total == ends.count("length")
        assert gauges.computed_total == ends.count("computed")
        assert gauges.receive_failed_total == ends.count("receive_failed")
        assert gauges.cancelled_total == ends.count("cancelled")
        assert gauges.expired_total == ends.count("expired")


def expected_output(max_tokens: int, eos_at: int | None, min_tokens: int) -> list[int]:
    """The tokens the model worker samples, cut where the rules of stopping cut them."""
    tokens: list[int] = []
    for index in range(max_tokens):
        stop = eos_at is not None and index >= eos_at
        tokens.append(STOP if stop else 100 + index)
        if stop and index >= min_tokens:
            break
    return tokens


class PrefillMachine(SchedulerMachine):
    role = Role.PREFILL


class DecodeMachine(SchedulerMachine):
    role = Role.DECODE


class BothMachine(SchedulerMachine):
    role = Role.BOTH
