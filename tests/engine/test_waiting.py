"""The waiting queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.request import Phase, Request
from pdserve.engine.waiting import WaitingQueue


def request(seq: int, priority: int = 0, deadline: float | None = None) -> Request:
    return Request(
        id=str(seq),
        seq=seq,
        prompt=[1] * (seq % 3 + 1),
        sampling=None,
        max_tokens=0,
        priority=priority,
        deadline=deadline,
    )


def leave(queue: WaitingQueue, subject: Request) -> None:
    subject.phase = Phase.FINISHED
    queue.left(subject)


@given(st.lists(st.tuples(st.sampled_from("pppcah"), st.integers(0, 1 << 16), st.integers(-2, 2))))
def test_it_is_a_sorted_list(calls: list[tuple[str, int, int]]) -> None:
    queue, model = WaitingQueue(), list[Request]()
    for seq, (call, pick, priority) in enumerate(calls):
        if call == "p":
            model.append(request(seq, priority, pick % 50 if pick % 2 else None))
            queue.push(model[-1])
        elif call == "c" and model:
            leave(queue, model.pop(pick % len(model)))
        model.sort(key=lambda r: (r.priority, r.seq))
        assert queue.head() is (model[0] if model else None)
        if call in "ah" and model:
            leave(queue, model.pop(0))
        queue.check()
        deadlines = [r.deadline for r in model if r.deadline is not None]
        assert queue.next_deadline() == min(deadlines, default=None)
        assert queue.count == len(model)


def test_cancelled_entries_do_not_pile_up_behind_a_blocked_head() -> None:
    queue = WaitingQueue()
    queue.push(request(0, priority=-1, deadline=1.0))
    for seq in range(1, 5000):
        subject = request(seq, deadline=2.0 + seq)
        queue.push(subject)
        leave(queue, subject)
    assert len(queue._heap) < 100
    assert len(queue._deadlines) < 100
    assert queue.count == 1


def test_expired_comes_in_order_of_deadlines_and_includes_the_moment_itself() -> None:
    queue = WaitingQueue()
    late, soon, never = request(0, deadline=5.0), request(1, deadline=3.0), request(2)
    for subject in (late, soon, never):
        queue.push(subject)
    assert queue.expired(2.9) is None
    assert queue.expired(3.0) is soon
    leave(queue, soon)
    assert queue.expired(3.0) is None
    assert queue.expired(9.0) is late
    leave(queue, late)
    assert queue.expired(1e9) is None


def test_retry_after_follows_the_rate_of_admissions() -> None:
    queue = WaitingQueue()
    for seq in range(20):
        queue.push(request(seq))
    assert queue.retry_after(0.0) == 1.0
    for second in range(10):
        queue.admitted(float(second))
    assert queue.retry_after(10.0) == 20.0  # one a second, 20 wait
    assert queue.retry_after(20.0) == 40.0  # nothing has moved since
    assert queue.retry_after(1e6) == 60.0
    for _ in range(64):
        queue.admitted(1e6)
    assert queue.retry_after(1e6) == 1.0
