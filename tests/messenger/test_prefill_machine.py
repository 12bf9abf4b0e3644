"""The prefill machine against a scripted peer, scheduler and fabric."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import FabricError, PeerLost
from pdserve.messenger.events import (
    BatchDone,
    ChunkPlanned,
    Closed,
    ComputeFailed,
    Drain,
    Effect,
    Enqueue,
    Enqueued,
    Event,
    Key,
    LinkLost,
    LinkUp,
    PostWrites,
    Received,
    Refused,
    Send,
    StepEnded,
    Ticked,
    Timer,
)
from pdserve.messenger.facts import GroupFacts
from pdserve.messenger.imm import base, unpack
from pdserve.messenger.messages import (
    Accepted,
    Cancel,
    Failed,
    Heartbeat,
    Message,
    Prefill,
    Quiet,
    Rejected,
)
from pdserve.messenger.prefill import PrefillConfig, PrefillMachine
from pdserve.messenger.prefill_table import State

from .world import node_facts

TICKS = 4
"""Ticks of a step: 2 + 1 layers and the final norm."""
VOCAB = 50
KEY = Key(1, "r", 1)
ERROR = FabricError("write failed", name="FI_EIO")


def prefill(request: str = "r", tokens: int = 6, page: int = 1, slot: int = 0, **fields: Any) -> Prefill:
    pages = -(-(tokens - 1) // 2)
    good: dict[str, Any] = {
        "request": request,
        "attempt": 1,
        "group": 0,
        "epoch": 7,
        "tokens": list(range(tokens)),
        "first_token": 0,
        "pages": list(range(page, page + pages)),
        "slots": [base(slot + i, 5) for i in range(-(-pages // 2))],
    }
    return Prefill(**(good | fields))


class Bench:
    """A machine and its clock; link 1 to decode node d0 is up."""

    def __init__(self, tp: int = 1) -> None:
        self.now = 50.0
        self.machine = PrefillMachine(PrefillConfig(node_facts("p0", "prefill", tp, 30), vocab_size=VOCAB))
        self.effects: list[Effect] = []
        self.do(LinkUp(1, node_facts("d0", "decode")))

    def do(self, event: Event) -> list[Effect]:
        self.effects = self.machine.handle(event, self.now)
        self.machine.check()
        return self.effects

    def hear(self, message: Message, link: int = 1) -> list[Effect]:
        return self.do(Received(link, message))

    def plan(self, step: int, first: int, pages: list[int], last: bool, key: Key = KEY) -> list[Effect]:
        return self.do(ChunkPlanned(key, step, first, pages, last))

    def done(self, *batches: int) -> list[Effect]:
        return [effect for batch in batches for effect in self.do(BatchDone(batch))]

    def posts(self) -> list[tuple[str, int]]:
        return [(e.key.request, e.layer) for e in self.effects if isinstance(e, PostWrites)]

    def sent(self) -> list[Message]:
        return [effect.message for effect in self.effects if isinstance(effect, Send)]

    def names(self) -> list[str]:
        return [type(effect).__name__ for effect in self.effects]

    def state(self, key: Key = KEY) -> State | None:
        work = self.machine._works.get(key)
        return work.state if work else None


def bring(bench: Bench, state: State) -> None:
    """Work r (3 pages, 2 segments) into a state; where batches are outstanding, they are 1, 2 and 3."""
    bench.hear(prefill())
    if state is State.WITHDRAWN:
        bench.hear(Cancel("r", 1))
    elif state is State.ORPHANED:
        bench.do(LinkLost(1, PeerLost("gone")))
    elif state is not State.OFFERED:
        bench.do(Enqueued(KEY, 2))
        if state is not State.QUEUED:
            bench.plan(0, 0, [11, 12, 13], True)
            bench.do(Ticked(4 if state is State.DRAINING else 3))
    if state is State.CANCELLING:
        bench.hear(Cancel("r", 1))
    elif state is State.FAILING:
        bench.do(Ticked(4))
        bench.machine.handle(BatchDone(3, ERROR), bench.now)
    elif state is State.CLOSING:
        bench.do(LinkLost(1, PeerLost("gone")))
    assert bench.state() is state


def test_the_way_of_a_work() -> None:
    bench = Bench()
    bench.hear(prefill(priority=2, remaining=3.5, trace="t", salt="s"))
    assert bench.effects == [Enqueue(KEY, list(range(6)), 5, 2, 3.5, "t", "s")]
    bench.do(Enqueued(KEY, 4))
    assert bench.sent() == [Accepted("r", 1, 4)]
    assert bench.plan(0, 0, [11], False) == []
    assert bench.plan(1, 1, [21, 22], True) == []
    posted: dict[int, int] = {}
    batches = []
    for value in range(1, 2 * TICKS + 1):
        bench.do(Ticked(value))
        layer = (value - 1) % TICKS
        assert bench.posts() == ([("r", layer)] if layer < 3 else [])
        for effect in bench.effects:
            assert isinstance(effect, PostWrites)
            batches.append(effect.batch)
            for imm in effect.table.rows[3::4]:
                slot, generation, runs = unpack(imm)
                assert generation == 5
                posted[slot] = posted.get(slot, 0) + runs
    assert posted == {0: 6, 1: 3}
    assert bench.state() is State.DRAINING
    assert bench.done(*batches[:-1]) == []
    bench.done(batches[-1])
    assert bench.names() == ["Send", "Release"]
    assert bench.sent() == [Quiet("r", 1, [6, 3])]
    assert bench.machine.idle


def test_layers_are_caught_up_in_order_over_all_requests() -> None:
    bench = Bench()
    keys = [Key(1, name, 1) for name in ("a", "b")]
    for number, key in enumerate(keys):
        bench.hear(prefill(key.request, tokens=3, page=1 + number, slot=number))
        bench.do(Enqueued(key))
        bench.plan(0, 0, [11 + number], True, key)
    bench.do(Ticked(2))
    assert bench.posts() == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    bench.do(Ticked(2))
    assert bench.posts() == []
    bench.do(Ticked(4))
    assert bench.posts() == [("a", 2), ("b", 2)]


def test_ticks_over_several_steps_and_the_offsets_of_each_layer() -> None:
    bench = Bench()
    bench.hear(prefill(tokens=5))
    bench.do(Enqueued(KEY))
    bench.plan(0, 0, [11], False)
    bench.plan(1, 1, [12], True)
    effects = bench.do(Ticked(2 * TICKS))
    assert bench.posts() == [("r", layer) for layer in (0, 1, 2, 0, 1, 2)]
    page = 8  # 2 heads of 2 tokens of 2 bytes
    group = 2 * 30 * page
    wanted = [
        (layer // 2 * group + layer % 2 * 30 * page + source * page)
        for source, layers in ((11, range(3)), (12, range(3)))
        for layer in layers
    ]
    assert [e.table.rows[0] + e.src_shift for e in effects if isinstance(e, PostWrites)] == wanted


def test_an_unequal_tp_posts_one_batch_for_each_pair_of_ranks() -> None:
    bench = Bench(tp=2)
    bring(bench, State.RUNNING)
    assert bench.posts() == [("r", layer) for layer in (0, 0, 1, 1, 2, 2)]
    assert {e.table.src_rank for e in bench.effects if isinstance(e, PostWrites)} == {0, 1}
    bench.done(*range(1, 7))
    bench.do(Ticked(4))
    assert bench.sent() == [Quiet("r", 1, [12, 6])]


def test_a_step_that_ended_has_made_all_its_ticks() -> None:
    bench = Bench()
    bring(bench, State.QUEUED)
    bench.plan(0, 0, [11, 12, 13], True)
    bench.do(StepEnded(0))
    assert bench.posts() == [("r", 0), ("r", 1), ("r", 2)]
    assert bench.state() is State.DRAINING
    assert bench.do(Ticked(4)) == []
    assert bench.machine.statistics()["steps_under_way"] == 0


@pytest.mark.parametrize("ticked", [1, 2, 3, 4, 9])
def test_a_chunk_told_late_loses_nothing(ticked: int) -> None:
    bench = Bench()
    bring(bench, State.QUEUED)
    bench.do(Ticked(ticked))
    bench.plan(0, 0, [11, 12, 13], True)
    assert bench.posts() == [("r", layer) for layer in range(min(ticked, 3))]
    rest = bench.do(Ticked(12))
    assert len(bench.posts()) == 3 - min(ticked, 3)
    assert bench.state() is State.DRAINING
    assert bench.machine.statistics()["steps_under_way"] == 0
    assert len(rest) == len(bench.posts())


def test_what_the_scheduler_may_not_plan() -> None:
    bench = Bench()
    bring(bench, State.QUEUED)
    for first, pages, last in (
        (1, [5], False),
        (0, [1, 2, 3, 4], True),
        (0, [1, 2, 3, 4], False),
        (0, [1], True),
    ):
        with pytest.raises(ValueError, match="planned"):
            bench.machine.handle(ChunkPlanned(KEY, 0, first, pages, last), bench.now)


# ---------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("fields", "code", "word"),
    [
        ({"epoch": 6}, "epoch", "6"),
        ({"group": 1}, "bad_pages", "group is 1"),
        ({"pages": [1, 2]}, "bad_pages", "2 pages"),
        ({"pages": [1, 2, 3, 4]}, "bad_pages", "4 pages"),
        ({"pages": [0, 1, 2]}, "bad_pages", "0..2"),
        ({"pages": [38, 39, 40]}, "bad_pages", "38..40"),
        ({"pages": [3, 3, 4]}, "bad_pages", "twice"),
        ({"slots": [base(0, 1)]}, "bad_slots", "1 slots"),
        ({"slots": [base(0, 1), base(0, 2)]}, "bad_slots", "distinct"),
        ({"slots": [base(0, 1), base(1, 1) + 3]}, "bad_slots", "zero"),
        ({"handover": "hidden"}, "unsupported", "'hidden'"),
        ({"context_slot": 0}, "unsupported", "context_slot"),
        ({"first_token": 2}, "unsupported", "first_token"),
        ({"adapter": "x"}, "unsupported", "reserved"),
        ({"inputs": [b"x"]}, "unsupported", "reserved"),
        ({"tokens": 1}, "too_short", "1 token"),
        ({"tokens": 65}, "too_long", "65 tokens"),
        ({"tokens": 62}, "too_long", "31 pages"),
        ({"tokens": VOCAB + 2}, "bad_tokens", "token id 51 is not in 0..49"),
    ],
)
def test_a_bad_prefill_is_rejected_and_costs_nothing(fields: dict[str, Any], code: str, word: str) -> None:
    bench = Bench()
    bench.hear(prefill(**fields))
    (message,) = bench.sent()
    assert isinstance(message, Rejected)
    assert message.code == code
    assert word in message.reason
    assert bench.machine.idle


def test_slots_of_another_live_work_are_refused() -> None:
    bench = Bench()
    bring(bench, State.DRAINING)
    bench.hear(prefill("s", page=10, slot=1))
    (message,) = bench.sent()
    assert isinstance(message, Rejected)
    assert "in use" in message.reason
    bench.done(1, 2, 3)
    assert isinstance(bench.hear(prefill("s", page=10, slot=1))[0], Enqueue)


def test_the_same_attempt_twice_closes_the_link() -> None:
    """Answering `Rejected` would call the first one quiet."""
    bench = Bench()
    bring(bench, State.QUEUED)
    bench.hear(prefill())
    assert bench.names() == ["CloseLink", "CancelCompute", "Release"]
    assert bench.machine.counters["breaches"] == 1


def test_a_message_that_is_not_a_decode_nodes_closes_the_link() -> None:
    bench = Bench()
    bench.hear(Accepted("r", 1, 0))
    assert bench.names() == ["CloseLink"]


def test_draining_rejects_new_work_and_ends_what_runs() -> None:
    bench = Bench()
    bring(bench, State.RUNNING)
    bench.do(Drain("maintenance"))
    bench.hear(prefill("s", page=10, slot=5))
    (message,) = bench.sent()
    assert isinstance(message, Rejected)
    assert (message.code, message.retry_after) == ("draining", 1.0)
    bench.do(Ticked(4))
    bench.done(1, 2, 3)
    assert bench.sent() == [Quiet("r", 1, [6, 3])]


# ---------------------------------------------------------------- ends


def test_the_scheduler_refuses() -> None:
    bench = Bench()
    bring(bench, State.OFFERED)
    bench.do(Refused(KEY, "overloaded", "queue full", 2.5))
    assert bench.effects == [Send(1, Rejected("r", 1, "overloaded", "queue full", 2.5))]
    assert bench.machine.idle


def test_cancelled_while_offered() -> None:
    for answer in (Enqueued(KEY), Refused(KEY, "overloaded", "", None)):
        bench = Bench()
        bring(bench, State.WITHDRAWN)
        assert bench.hear(Cancel("r", 1)) == []
        bench.do(answer)
        if isinstance(answer, Enqueued):
            assert bench.names() == ["CancelCompute", "Send", "Release"]
            assert bench.sent() == [Quiet("r", 1, [0, 0])]
        else:
            assert isinstance(bench.sent()[0], Rejected)
        assert bench.machine.idle


def test_orphaned_while_offered() -> None:
    for answer in (Enqueued(KEY), Refused(KEY, "overloaded", "", None)):
        for state in (State.OFFERED, State.WITHDRAWN):
            bench = Bench()
            bring(bench, state)
            bench.do(LinkLost(1, PeerLost("gone")))
            bench.do(Closed(1))
            assert bench.state() is State.ORPHANED
            bench.do(answer)
            assert bench.names() == (["CancelCompute", "Release"] if isinstance(answer, Enqueued) else [])
            assert bench.machine.idle


def test_cancelled_before_anything_was_posted() -> None:
    bench = Bench()
    bring(bench, State.QUEUED)
    bench.hear(Cancel("r", 1))
    assert bench.names() == ["CancelCompute", "Send", "Release"]
    assert bench.sent() == [Quiet("r", 1, [0, 0])]
    assert bench.hear(Cancel("r", 1)) == []


def test_cancelled_says_quiet_only_when_every_batch_has_ended() -> None:
    bench = Bench()
    bring(bench, State.QUEUED)
    bench.plan(0, 0, [11, 12, 13], True)
    bench.do(Ticked(2))
    bench.hear(Cancel("r", 1))
    assert bench.names() == ["CancelCompute"]
    assert bench.do(Ticked(4)) == []
    assert bench.done(1) == []
    bench.done(2)
    assert bench.sent() == [Quiet("r", 1, [4, 2])]
    assert bench.names() == ["Send", "Release"]


def test_cancelled_when_all_is_posted_changes_nothing() -> None:
    bench = Bench()
    bring(bench, State.DRAINING)
    assert bench.hear(Cancel("r", 1)) == []
    bench.done(1, 2, 3)
    assert bench.sent() == [Quiet("r", 1, [6, 3])]


@pytest.mark.parametrize("state", [State.RUNNING, State.DRAINING, State.CANCELLING])
def test_a_failed_write_is_told_at_once_without_a_number(state: State) -> None:
    bench = Bench()
    bring(bench, state)
    bench.do(BatchDone(2, ERROR))
    assert bench.sent() == [Failed("r", 1, "fabric_error", "write failed", None)]
    assert ("CancelCompute" in bench.names()) == (state is State.RUNNING)
    assert bench.state() is State.FAILING
    assert bench.do(Ticked(9)) == []
    assert bench.do(BatchDone(1)) == []
    bench.do(BatchDone(3, ERROR))
    assert bench.names() == ["Release"]


@pytest.mark.parametrize("state", [State.RUNNING, State.DRAINING, State.CANCELLING])
def test_the_last_batch_fails(state: State) -> None:
    bench = Bench()
    bring(bench, state)
    bench.done(1, 2)
    bench.do(BatchDone(3, ERROR))
    assert bench.names()[-2:] == ["Send", "Release"]
    assert bench.machine.idle


def test_a_failed_computation_is_told_with_what_was_posted() -> None:
    bench = Bench()
    bring(bench, State.RUNNING)
    assert bench.do(ComputeFailed(KEY, "worker_failed", "rank 0 died", 3.0)) == []
    bench.done(1, 2, 3)
    assert bench.sent() == [Failed("r", 1, "worker_failed", "rank 0 died", [6, 3], 3.0)]
    assert bench.names() == ["Send", "Release"]
    bench = Bench()
    bring(bench, State.QUEUED)
    bench.do(ComputeFailed(KEY, "worker_failed", "rank 0 died"))
    assert bench.sent() == [Failed("r", 1, "worker_failed", "rank 0 died", [0, 0])]


@pytest.mark.parametrize("state", [State.RUNNING, State.DRAINING, State.CANCELLING, State.FAILING])
@pytest.mark.parametrize("by_batches", [True, False])
def test_a_lost_link_keeps_source_pages_until_no_write_can_read_them(state: State, by_batches: bool) -> None:
    bench = Bench()
    bring(bench, state)
    bench.do(LinkLost(1, PeerLost("gone")))
    assert bench.names() == ["CloseLink"] + ["CancelCompute"] * (state is State.RUNNING)
    assert bench.do(LinkLost(1, PeerLost("gone"))) == []
    assert bench.do(Ticked(9)) == []
    if by_batches:
        bench.done(1)
        bench.do(BatchDone(2, ERROR))
        if state is not State.FAILING:
            bench.do(BatchDone(3))
        assert bench.names() == ["Release"]
        assert bench.do(Closed(1)) == []
    else:
        bench.do(Closed(1))
        assert bench.names() == ["Release"]
        assert bench.do(BatchDone(1, ERROR)) == []
    assert bench.machine.idle
    assert bench.do(Closed(1)) == []


@pytest.mark.parametrize(
    "state", [State.DRAINING, State.CANCELLING, State.FAILING, State.CLOSING, State.RUNNING]
)
def test_late_news_is_ignored(state: State) -> None:
    """What crosses with the end of a work changes nothing."""
    bench = Bench()
    bring(bench, state)
    if state is not State.RUNNING:
        assert bench.do(ComputeFailed(KEY, "x", "y")) == []
    if state in (State.CANCELLING, State.FAILING, State.CLOSING):
        assert bench.plan(1, 0, [4], False) == []
    if state is not State.RUNNING:
        assert bench.hear(Cancel("r", 1)) == []
        assert bench.state() is state
    nobody = Key(1, "nobody", 1)
    assert bench.do(Enqueued(nobody)) == []
    assert bench.plan(7, 0, [4], False, nobody) == []
    assert bench.do(BatchDone(999)) == []


def test_an_endpoint_that_closes_by_itself() -> None:
    bench = Bench()
    bring(bench, State.RUNNING)
    bench.do(Closed(1))
    assert bench.names() == ["CancelCompute", "Release"]
    assert bench.machine.idle


def test_a_stopped_decode_node_loses_its_endpoint() -> None:
    bench = Bench()
    bring(bench, State.DRAINING)
    names = []
    for _ in range(10):
        bench.now += 0.25
        bench.do(Timer())
        names += [name for name in bench.names() if name != "Send"]
    assert names == ["CloseLink"]
    assert bench.machine.counters["deaths"] == 1
    assert bench.state() is State.CLOSING


def test_the_newest_hello_wins() -> None:
    bench = Bench()
    bring(bench, State.QUEUED)
    bench.do(LinkUp(2, node_facts("d0", "decode", incarnation=2)))
    assert bench.names()[:3] == ["CloseLink", "CancelCompute", "Release"]
    with pytest.raises(ValueError, match="up already"):
        bench.do(LinkUp(2, node_facts("d1", "decode")))


def test_groups_of_the_decode_node() -> None:
    """A prompt may go to any of a decode node's groups; tables name it."""
    bench = Bench()
    node = node_facts("d1", "decode", groups=(GroupFacts(1, 9, 1), GroupFacts(1, 50, 2)))
    bench.do(LinkUp(2, node))
    key = Key(2, "r", 1)
    assert isinstance(bench.hear(prefill(group=0, epoch=1, page=7), 2)[0], Send)
    bench.hear(prefill(group=1, epoch=2, page=7), 2)
    bench.do(Enqueued(key))
    bench.plan(0, 0, [11, 12, 13], True, key)
    (effect,) = bench.do(Ticked(1))
    assert isinstance(effect, PostWrites)
    assert effect.table.dst_group == 1
    assert effect.link == 2


def test_heartbeats_count_active_works() -> None:
    bench = Bench()
    bring(bench, State.RUNNING)
    bench.now += 0.25
    (beat,) = [e.message for e in bench.do(Timer()) if isinstance(e, Send)]
    assert isinstance(beat, Heartbeat)
    assert beat.load.active == 1
