"""The scheduler, one scene at a time."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.engine.events import Chunk, Event, Expired, PrefillComputed, TokenEvent
from pdserve.engine.limits import Role, SchedulerConfig
from pdserve.engine.plan import MorePages, NewSequence, SequenceOutput, StepResult, Work
from pdserve.engine.request import Phase, Request, TransitionError
from pdserve.engine.sampling import SamplingParams
from pdserve.engine.scheduler import Scheduler
from pdserve.errors import ClientError, ContextLengthExceeded, Overloaded, WorkerError
from tests.engine.model_worker import STOP

PAGE = 4


def scheduler(role: Role = Role.BOTH, **change: Any) -> Scheduler:
    values: dict[str, Any] = {
        "role": role,
        "page_size": PAGE,
        "num_pages": 33,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 64,
    }
    return Scheduler(SchedulerConfig(**(values | change)))


def submit(
    subject: Scheduler, id: str, tokens: int, max_tokens: int = 4, min_tokens: int = 0, **more: Any
) -> Request:
    prefill = subject.config.role is Role.PREFILL
    sampling = None if prefill else SamplingParams(stop_token_ids=(STOP,), min_tokens=min_tokens)
    more.setdefault("now", 0.0)
    return subject.submit(id, list(range(10, 10 + tokens)), sampling, 0 if prefill else max_tokens, **more)


def result(step: int, *tokens: tuple[int, int]) -> StepResult:
    return StepResult(step, [SequenceOutput(seq, token) for seq, token in tokens], 0, 0)


def work(subject: Scheduler) -> list[Work]:
    scheduled = subject.schedule(0.0)
    assert scheduled is not None
    subject.check()
    return scheduled.plan.work


def token(id: str, token: int, reason: Any = None) -> Event:
    return TokenEvent(id, token, None, None, reason)


def ready(subject: Scheduler, id: str, tokens: int, **more: Any) -> Request:
    """A request on a decode node whose KV has arrived."""
    request = submit(subject, id, tokens, **more)
    assert subject.admit(0.0) == [request]
    assert subject.received(id, 0.0)
    return request


def test_a_prompt_in_chunks_then_tokens() -> None:
    subject = scheduler()
    request = submit(subject, "a", 11, 3)
    assert subject.admit(1.0) == []
    assert request.phase is Phase.RUNNING
    assert request.admitted_at == 1.0
    first = subject.schedule(1.0)
    assert first is not None
    assert first.plan.new == [NewSequence(0, list(request.prompt), 11, [1, 2, 3], request.sampling)]
    assert first.plan.work == [Work(0, 0, 8, False)]
    assert (first.prompt_tokens, first.decode_tokens, first.chunks) == (8, 0, [])
    assert not first.plan.send
    assert work(subject) == [Work(0, 8, 3, True)]
    assert subject.schedule(1.0) is None, "two steps are in flight"
    assert subject.complete(result(0), 2.0) == []
    assert work(subject) == [Work(0, 11, 1, True)]
    assert subject.complete(result(1, (0, 50)), 2.0) == [token("a", 50)]
    fourth = subject.schedule(2.0)
    assert fourth is not None
    assert fourth.plan.pages == [MorePages(0, [4])], "position 12 begins a page"
    assert fourth.plan.work == [Work(0, 12, 1, True)]
    assert subject.complete(result(2, (0, 51)), 2.0) == [token("a", 51)]
    assert subject.schedule(2.0) is None, "the third token is under way, there is no fourth"
    assert subject.complete(result(3, (0, 52)), 2.0) == [token("a", 52, "length")]
    assert request.output == [50, 51, 52]
    last = subject.schedule(2.0)
    assert last is not None
    assert last.plan.finished == [0]
    assert last.plan.work == []
    assert not subject.idle
    assert subject.complete(result(4), 2.0) == []
    assert subject.idle


def test_an_overlapped_step_keeps_the_pages_of_a_sequence_that_has_ended() -> None:
    subject = scheduler()
    submit(subject, "a", 3)
    subject.admit(0.0)
    assert work(subject) == [Work(0, 0, 3, True)]
    assert work(subject) == [Work(0, 3, 1, True)]
    assert subject.complete(result(0, (0, STOP)), 0.0) == [token("a", STOP, "stop")]
    subject.check()
    gauges = subject.statistics()
    assert (gauges.pages_pending, gauges.pages_held, gauges.pages_reserved) == (1, 0, 0)
    assert gauges.running == 0
    assert subject.complete(result(1, (0, 99)), 0.0) == [], "its output is nobody's"
    assert subject.statistics().pages_free == 32


def test_a_cancel_while_running_waits_for_the_steps_that_name_the_pages() -> None:
    subject = scheduler(steps_in_flight=3)
    submit(subject, "a", 3)
    subject.admit(0.0)
    for _ in range(3):
        work(subject)
    assert subject.cancel("a", 0.0) is Phase.FINISHED
    assert subject.cancel("a", 0.0) is Phase.FINISHED
    for step in range(3):
        assert subject.statistics().pages_pending == 2
        assert subject.complete(result(step, (0, 5)), 0.0) == []
        subject.check()
    assert subject.statistics().pages_free == 32
    scheduled = subject.schedule(0.0)
    assert scheduled is not None
    assert scheduled.plan.finished == [0]


def test_what_was_never_published_is_freed_at_once_and_not_announced() -> None:
    subject = scheduler()
    submit(subject, "a", 3)
    subject.admit(0.0)
    subject.cancel("a", 0.0)
    assert subject.idle
    assert subject.statistics().pages_free == 32
    assert subject.schedule(0.0) is None


def test_the_end_of_one_and_the_start_of_another_travel_in_one_plan() -> None:
    subject = scheduler(max_num_seqs=1)
    submit(subject, "a", 3, 1)
    submit(subject, "b", 3, 1)
    subject.admit(0.0)
    assert subject.waiting == 1
    work(subject)
    subject.complete(result(0, (0, 7)), 0.0)
    subject.admit(0.0)
    scheduled = subject.schedule(0.0)
    assert scheduled is not None
    assert scheduled.plan.finished == [0]
    assert [new.seq for new in scheduled.plan.new] == [1]


@pytest.mark.parametrize(
    ("eos_at", "min_tokens", "max_tokens", "reasons"),
    [
        (0, 0, 4, ["stop"]),
        (0, 2, 4, [None, None, "stop"]),
        (2, 0, 3, [None, None, "stop"]),  # the last that is allowed, and EOS
        (9, 0, 2, [None, "length"]),
        (0, 9, 2, [None, "length"]),
        (0, 0, 1, ["stop"]),
    ],
)
def test_when_a_sequence_stops(
    eos_at: int, min_tokens: int, max_tokens: int, reasons: list[str | None]
) -> None:
    subject = scheduler(steps_in_flight=1)
    submit(subject, "a", 3, max_tokens, min_tokens)
    subject.admit(0.0)
    for step, reason in enumerate(reasons):
        assert len(work(subject)) == 1
        value = STOP if step >= eos_at else 100
        assert subject.complete(result(step, (0, value)), 0.0) == [token("a", value, reason)]
    assert subject.get("a") is None


def test_decode_tokens_go_first_and_prompts_share_the_rest_in_order() -> None:
    subject = scheduler()
    submit(subject, "a", 2, 9)
    subject.admit(0.0)
    assert work(subject) == [Work(0, 0, 2, True)]
    submit(subject, "b", 10, 2)
    submit(subject, "c", 2, 2)
    subject.admit(0.0)
    assert work(subject) == [Work(0, 2, 1, True), Work(1, 0, 7, False)]
    subject.complete(result(0, (0, 5)), 0.0)
    assert work(subject) == [Work(0, 3, 1, True), Work(1, 7, 3, True), Work(2, 0, 2, True)]


@pytest.mark.parametrize("tokens", [1, PAGE - 1, PAGE, PAGE + 1, 11, 12, 13, 16, 17, 19, 20])
def test_prefill_chunks_end_on_pages_and_cover_the_prompt_once(tokens: int) -> None:
    subject = scheduler(Role.PREFILL, max_num_batched_tokens=2 * PAGE + 3)
    request = submit(subject, "a", tokens)
    subject.admit(0.0)
    chunks: list[Chunk] = []
    step = 0
    events: list[Event] = []
    while not events:
        scheduled = subject.schedule(0.0)
        assert scheduled is not None
        assert scheduled.plan.send
        assert len(scheduled.chunks) == 1
        chunks += scheduled.chunks
        events = subject.complete(result(step), 0.0)
        step += 1
    assert events == [PrefillComputed("a")]
    assert [page for chunk in chunks for page in chunk.pages] == request.pages
    assert len(request.pages) == -(-tokens // PAGE)
    starts = [0]
    while tokens - starts[-1] > 2 * PAGE + 3:
        starts.append(starts[-1] + 2 * PAGE)
    assert [chunk.first_page * PAGE for chunk in chunks] == starts
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert request.phase is Phase.SENDING
    assert subject.statistics().pages_held == len(request.pages)
    subject.release("a", 0.0)
    assert subject.statistics().pages_free == 32


def test_a_release_may_overtake_the_result_of_the_last_step() -> None:
    subject = scheduler(Role.PREFILL)
    submit(subject, "a", 6)
    subject.admit(0.0)
    work(subject)
    subject.release("a", 0.0)
    subject.check()
    assert subject.statistics().pages_pending == 2
    assert subject.complete(result(0), 0.0) == [PrefillComputed("a")]
    assert subject.statistics().pages_free == 32


def test_a_cancelled_prefill_computes_no_more_and_keeps_its_pages_for_the_writes_under_way() -> None:
    subject = scheduler(Role.PREFILL)
    submit(subject, "a", 20)
    subject.admit(0.0)
    work(subject)
    assert subject.cancel("a", 0.0) is Phase.SENDING
    assert subject.schedule(0.0) is None
    assert subject.complete(result(0), 0.0) == []
    assert subject.statistics().pages_held == 5
    assert subject.cancel("a", 0.0) is Phase.SENDING
    subject.release("a", 0.0)
    assert subject.statistics().pages_free == 32
    assert subject.statistics().cancelled_total == 1


def test_a_cancelled_prefill_in_the_queue_is_gone_and_its_release_ignored() -> None:
    subject = scheduler(Role.PREFILL)
    submit(subject, "a", 20)
    assert subject.cancel("a", 0.0) is Phase.FINISHED
    subject.release("a", 0.0)
    assert subject.idle


def test_a_received_request_starts_with_its_last_prompt_token() -> None:
    subject = scheduler(Role.DECODE)
    request = submit(subject, "a", 9)
    assert subject.admit(0.0) == [request]
    assert request.phase is Phase.RECEIVING
    assert len(request.pages) == 3
    assert request.destination == request.pages[:2], "8 tokens are received"
    assert subject.statistics().pages_destination == 2
    assert subject.schedule(0.0) is None
    assert subject.received("a", 0.0)
    assert subject.get("a") is request
    assert subject.statistics().running == 1
    assert work(subject) == [Work(0, 8, 1, True)]
    with pytest.raises(TransitionError, match="a: received is not possible in phase running"):
        subject.received("a", 0.0)


def test_a_prompt_of_one_token_needs_no_peer() -> None:
    subject = scheduler(Role.DECODE)
    request = submit(subject, "a", 1)
    assert subject.admit(0.0) == []
    assert request.phase is Phase.RUNNING
    assert work(subject) == [Work(0, 0, 1, True)]


def test_receiving_takes_no_rows_and_what_is_ready_waits_for_one() -> None:
    subject = scheduler(Role.DECODE, max_num_seqs=1, max_receiving=2)
    a = ready(subject, "a", 5, max_tokens=1)
    b, c, d = submit(subject, "b", 5), submit(subject, "c", 5), submit(subject, "d", 5)
    assert subject.admit(0.0) == [b, c], "a runs, two receive, that is the limit"
    subject.received("c", 0.0)
    subject.received("b", 0.0)
    assert (a.phase, b.phase, c.phase, d.phase) == (Phase.RUNNING, Phase.READY, Phase.READY, Phase.WAITING)
    assert subject.admit(0.0) == []
    work(subject)
    subject.complete(result(0, (0, 9)), 0.0)
    assert subject.admit(0.0) == [d]
    assert (b.phase, c.phase) == (Phase.READY, Phase.RUNNING), "in the order of arrival of the KV"
    assert work(subject) == [Work(c.seq, 4, 1, True)]
    subject.cancel("b", 0.0)
    subject.check()
    assert subject.statistics().ready == 0


@pytest.mark.parametrize("by", ["cancel", "end_receiving"])
def test_pages_of_a_transfer_that_ended_stay_away_until_there_is_proof(by: str) -> None:
    subject = scheduler(Role.DECODE)
    request = submit(subject, "a", 10, 9)
    subject.admit(0.0)
    exposed = request.destination
    getattr(subject, by)("a", 0.0)
    assert request.phase is Phase.QUARANTINED
    subject.check()
    gauges = subject.statistics()
    assert (gauges.pages_quarantined, gauges.pages_free, gauges.pages_reserved) == (3, 29, 0)
    assert not subject.end_receiving("a", 0.0)
    with pytest.raises(ClientError, match=r"request id a is in use \(phase quarantined\)"):
        submit(subject, "a", 3)
    submit(subject, "b", 60)
    subject.admit(0.0)
    other = subject.get("b")
    assert other is not None
    assert not set(other.pages) & set(exposed)
    subject.pages_safe("a")
    assert subject.statistics().pages_quarantined == 0
    assert subject.get("a") is None


def test_a_cancel_that_crosses_the_last_write_frees_the_pages() -> None:
    subject = scheduler(Role.DECODE)
    submit(subject, "a", 10)
    subject.admit(0.0)
    subject.cancel("a", 0.0)
    assert not subject.received("a", 0.0)
    assert subject.idle
    assert subject.statistics().pages_free == 32


def test_pages_are_not_safe_while_somebody_receives_into_them() -> None:
    subject = scheduler(Role.DECODE)
    submit(subject, "a", 10)
    subject.admit(0.0)
    with pytest.raises(TransitionError, match="a: pages_safe is not possible in phase receiving"):
        subject.pages_safe("a")
    subject.check()


def test_small_requests_do_not_overtake_a_large_one() -> None:
    subject = scheduler(num_pages=17, max_num_seqs=4)
    submit(subject, "small", 8, 1)
    large = submit(subject, "large", 60, 4)
    submit(subject, "next", 4, 1)
    subject.admit(0.0)
    assert subject.waiting == 2
    assert subject.statistics().head_arrival == 0.0
    work(subject)
    subject.complete(result(0, (0, 9)), 0.0)
    subject.admit(0.0)
    assert large.phase is Phase.RUNNING


def test_lower_priority_numbers_go_first() -> None:
    subject = scheduler(max_num_seqs=1)
    submit(subject, "a", 4, priority=1)
    submit(subject, "b", 4, priority=0)
    submit(subject, "c", 4, priority=-1)
    order = []
    for _ in range(3):
        subject.admit(0.0)
        (running,) = [id for id in "abc" if (r := subject.get(id)) and r.phase is Phase.RUNNING]
        order.append(running)
        subject.cancel(running, 0.0)
    assert order == ["c", "b", "a"]


def test_a_full_queue_says_when_to_come_back() -> None:
    subject = scheduler(max_waiting=2, max_num_seqs=1)
    submit(subject, "a", 4)
    submit(subject, "b", 4)
    with pytest.raises(Overloaded, match="2 requests are waiting; max_waiting is 2") as caught:
        submit(subject, "c", 4)
    assert caught.value.retry_after == 1.0
    assert caught.value.status == 503
    subject.admit(10.0)
    submit(subject, "c", 4)
    with pytest.raises(Overloaded) as caught:
        submit(subject, "d", 4, now=14.0)
    assert caught.value.retry_after == 8.0, "one was admitted in 4 seconds, two wait"
    assert subject.cancel("c", 0.0) is Phase.FINISHED
    submit(subject, "d", 4)


def test_waiting_requests_expire() -> None:
    subject = scheduler()
    submit(subject, "a", 4, deadline=5.0, now=2.0)
    submit(subject, "b", 4, deadline=6.0, now=2.0)
    assert subject.next_deadline() == 5.0
    assert subject.expire(4.0) == []
    assert subject.expire(5.0) == [Expired("a", 3.0)]
    subject.admit(5.0)
    assert subject.next_deadline() is None
    assert subject.expire(9.0) == [], "b is running"


@pytest.mark.parametrize("role", Role)
def test_a_request_of_the_wrong_kind_is_refused(role: Role) -> None:
    subject = scheduler(role)
    prefill = role is Role.PREFILL
    with pytest.raises(ClientError, match=f"a {role.value} node takes no such request") as caught:
        subject.submit("a", [1], SamplingParams() if prefill else None, 0 if prefill else 1, now=0.0)
    assert caught.value.param == "sampling"


def test_nothing_is_kept_of_a_refused_request() -> None:
    subject = scheduler()
    with pytest.raises(ContextLengthExceeded):
        submit(subject, "a", 64)
    with pytest.raises(ClientError, match="prompt has 0 tokens"):
        submit(subject, "a", 0)
    assert subject.idle
    assert subject.room(60) == 4


def test_a_result_out_of_order_is_the_workers_fault() -> None:
    subject = scheduler()
    with pytest.raises(WorkerError, match="result of step 0 arrived; expected: none"):
        subject.complete(result(0), 0.0)
    submit(subject, "a", 4)
    subject.admit(0.0)
    work(subject)
    with pytest.raises(WorkerError, match="result of step 1 arrived; expected: 0"):
        subject.complete(result(1), 0.0)
    with pytest.raises(WorkerError, match="step 0 returned no token for sequence 0"):
        subject.complete(result(0), 0.0)


def test_a_release_of_a_generating_request_frees_nothing() -> None:
    subject = scheduler()
    request = submit(subject, "a", 4)
    subject.admit(0.0)
    with pytest.raises(TransitionError, match="a: release is for prefill-only requests"):
        subject.release("a", 0.0)
    assert request.phase is Phase.RUNNING
    subject.check()


def test_a_step_never_looks_at_the_waiting_queue() -> None:
    subject = scheduler()
    submit(subject, "a", 4, 2)
    subject.admit(0.0)
    subject._queue = None  # type: ignore[assignment]
    subject.schedule(0.0)
    subject.schedule(0.0)
    subject.complete(result(0, (0, 8)), 0.0)
    assert subject.complete(result(1, (0, 8)), 0.0) == [token("a", 8, "length")]


def test_logprobs_pass_through() -> None:
    subject = scheduler()
    submit(subject, "a", 4)
    subject.admit(0.0)
    work(subject)
    top = [(7, -0.1), (9, -2.0)]
    output = SequenceOutput(0, 7, -0.1, top)
    assert subject.complete(StepResult(0, [output], 0, 0), 0.0) == [TokenEvent("a", 7, -0.1, top, None)]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.BOTH])
def test_prompt_tokens_wait_until_a_step_is_published_for_them(role: Role) -> None:
    subject = scheduler(role)
    for id in ("a", "b"):
        submit(subject, id, 20)
    assert subject.statistics().waiting_tokens == 40
    subject.admit(0.0)
    left = [subject.statistics().unplanned_tokens]
    for step in range(5):
        work(subject)
        left.append(subject.statistics().unplanned_tokens)
        subject.complete(result(step, *[(seq, 9) for seq in range(2)]), 0.0)
    assert subject.statistics().waiting_tokens == 0
    assert left == [40, 32, 24, 16, 8, 0] if role is Role.PREFILL else left[-1] <= 8
    assert left == sorted(left, reverse=True)
