"""The decode machine against a scripted peer, honest or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdserve.errors import (
    ContextLengthExceeded,
    Draining,
    FabricError,
    NoPeer,
    Overloaded,
    PdserveError,
    PeerError,
    PeerLost,
)
from pdserve.messenger.choice import longest_prompt
from pdserve.messenger.decode import DecodeConfig, DecodeMachine
from pdserve.messenger.decode_table import LIVE, TRANSITIONS, Happening, State
from pdserve.messenger.events import (
    ArmSlot,
    CancelRequest,
    DisarmSlot,
    Drain,
    Effect,
    Event,
    Failed,
    Fence,
    Fenced,
    LinkLost,
    LinkUp,
    PagesSafe,
    Ready,
    Received,
    Rehello,
    Send,
    SlotCounted,
    SlotOvershoot,
    SlotProgress,
    Submit,
    Timer,
)
from pdserve.messenger.facts import GroupFacts
from pdserve.messenger.imm import unpack
from pdserve.messenger.messages import Accepted, Bye, Cancel, Heartbeat, Load, Prefill, Quiet, Rejected
from pdserve.messenger.messages import Failed as FailedMessage
from pdserve.messenger.messages import Message as AnyMessage

from .world import node_facts

LAYER_RUNS = 3
"""Runs a page makes with equal tp: one a layer, 2 + 1 layers."""


class Bench:
    """A machine and its clock."""

    def __init__(self, *peers: str, slots: int = 8, **changes: object) -> None:
        self.now = 50.0
        self.machine = DecodeMachine(DecodeConfig(node_facts("d0", "decode"), slots=slots))
        self.effects: list[Effect] = []
        self.slots: dict[str, list[tuple[int, int]]] = {}
        for number, name in enumerate(peers, 1):
            self.do(LinkUp(number, node_facts(name, "prefill", **changes)))

    def do(self, event: Event) -> list[Effect]:
        self.effects = self.machine.handle(event, self.now)
        self.machine.check()
        self.machine.next_deadline()  # asked after every event, and must forget none
        for effect in self.effects:
            if isinstance(effect, Send) and isinstance(effect.message, Prefill):
                self.slots[effect.message.request] = [unpack(imm)[:2] for imm in effect.message.slots]
        return self.effects

    def hear(self, message: AnyMessage, link: int = 1) -> list[Effect]:
        return self.do(Received(link, message))

    def submit(self, request: str = "r", tokens: int = 6, page: int = 1, **fields: Any) -> list[Effect]:
        pages = -(-(tokens - 1) // 2)
        return self.do(Submit(request, list(range(tokens)), list(range(page, page + pages)), **fields))

    def count(self, segment: int, count: int, request: str = "r") -> list[Effect]:
        slot, generation = self.slots[request][segment]
        return self.do(SlotProgress(slot, generation, count))

    def count_all(self, segment: int, request: str = "r") -> list[Effect]:
        return self.do(SlotCounted(*self.slots[request][segment]))

    def wait(self, seconds: float, beats: int = 1) -> list[Effect]:
        """Time passes; peers on links 1..beats are heard of all the while."""
        effects = []
        end = self.now + seconds
        number = 1
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            number += 1
            for link in range(1, beats + 1):
                effects += self.hear(Heartbeat(number, number + 1000), link)
            effects += self.do(Timer())
        self.effects = [e for e in effects if not (isinstance(e, Send) and isinstance(e.message, Heartbeat))]
        return self.effects

    def state(self, request: str = "r") -> State | None:
        fetch = self.machine._fetches.get(request)
        return fetch.state if fetch else None

    def error(self) -> PdserveError:
        (error,) = [effect.error for effect in self.effects if isinstance(effect, Failed)]
        return error

    def sent(self) -> list[AnyMessage]:
        return [effect.message for effect in self.effects if isinstance(effect, Send)]

    def names(self) -> list[str]:
        return [type(effect).__name__ for effect in self.effects]


def bring(bench: Bench, state: State) -> None:
    """Request r, of 3 pages in 2 segments (6 and 3 runs), into a state. Nothing counted unless it must be."""
    bench.submit()
    if state in (State.RECEIVING, State.LANDING, State.SETTLING):
        bench.hear(Accepted("r", 1, 0))
    if state in (State.LANDING, State.SETTLING):
        bench.hear(Quiet("r", 1, [6, 3]))
    if state in (State.CANCELLING, State.SETTLING):
        bench.do(CancelRequest("r"))
    if state is State.FENCING:
        bench.do(LinkLost(1, PeerLost("gone")))
    assert bench.state() is state


STATES = [State.ASKED, State.RECEIVING, State.LANDING, State.CANCELLING, State.SETTLING]


def test_the_way_to_ready() -> None:
    bench = Bench("p0")
    bench.submit(priority=3, trace="00-1", salt="s", deadline_s=9.0)
    assert bench.names() == ["ArmSlot", "ArmSlot", "Send"]
    assert [(e.slot, e.runs) for e in bench.effects if isinstance(e, ArmSlot)] == [(0, 6), (1, 3)]
    (prefill,) = bench.sent()
    assert isinstance(prefill, Prefill)
    assert (prefill.attempt, prefill.epoch, prefill.pages) == (1, 7, [1, 2, 3])
    assert (prefill.priority, prefill.trace, prefill.salt, prefill.remaining) == (3, "00-1", "s", 9.0)
    assert prefill.context_slot is None
    bench.hear(Accepted("r", 1, 2))
    assert bench.count_all(1) == []
    assert bench.count(0, 5) == []
    bench.count_all(0)
    assert bench.names() == ["DisarmSlot", "DisarmSlot", "Ready"]
    assert bench.machine.idle
    assert bench.hear(Quiet("r", 1, [6, 3])) == []


def test_counts_alone_make_ready_even_before_accepted() -> None:
    bench = Bench("p0")
    bench.submit()
    bench.count(0, 6)
    bench.count_all(1)
    assert Ready("r") in bench.effects
    assert bench.hear(Accepted("r", 1, 0)) == []
    assert bench.machine.counters["stale_messages"] == 1
    assert bench.machine.counters["breaches"] == 0


def test_quiet_held_back_or_early_changes_nothing_for_ready() -> None:
    bench = Bench("p0")
    bring(bench, State.LANDING)
    bench.count_all(0)
    bench.count_all(1)
    assert Ready("r") in bench.effects


def test_no_peer_at_all() -> None:
    bench = Bench()
    bench.submit()
    assert bench.names() == ["Failed", "PagesSafe"]
    assert isinstance(bench.error(), NoPeer)
    assert bench.error().retry_after == 1.0
    assert bench.machine.idle


def test_peers_that_say_bye_or_are_lost_are_not_asked() -> None:
    bench = Bench("p0", "p1")
    bench.hear(Bye("draining"), link=1)
    bench.do(LinkLost(2, PeerLost("gone")))
    bench.submit()
    assert isinstance(bench.error(), NoPeer)


def test_least_load_then_turn() -> None:
    bench = Bench("p0", "p1", "p2")
    for link, waiting in ((1, 500), (2, 100), (3, 100)):
        bench.hear(Heartbeat(1, 0, Load(waiting_tokens=waiting)), link)
    asked = []
    for number in range(4):
        bench.submit(f"r{number}", tokens=2, page=1 + number)
        asked += [effect.link for effect in bench.effects if isinstance(effect, Send)]
    # Equal ones in turn: what was asked since counts.
    assert asked == [2, 3, 2, 3]
    bench.hear(Heartbeat(2, 0, Load(waiting_tokens=0)), 1)
    bench.submit("s", tokens=2, page=9)
    assert [effect.link for effect in bench.effects if isinstance(effect, Send)] == [1]


def test_rejected_goes_to_the_next_untried_then_overloaded() -> None:
    bench = Bench("p0", "p1")
    bench.submit()
    first = bench.slots["r"]
    bench.hear(Rejected("r", 1, "overloaded", "queue full", 7.0), 1)
    assert bench.names() == ["DisarmSlot", "DisarmSlot", "ArmSlot", "ArmSlot", "Send"]
    assert not set(first) & set(bench.slots["r"])
    bench.hear(Rejected("r", 2, "overloaded", "queue full", 4.0), 2)
    assert isinstance(bench.error(), Overloaded)
    assert bench.error().retry_after == 4.0
    assert bench.names()[-1] == "PagesSafe"


@pytest.mark.parametrize(
    ("code", "kind"), [("too_long", ContextLengthExceeded), ("draining", Overloaded), ("epoch", PeerError)]
)
def test_what_refusals_come_to(code: str, kind: type[PdserveError]) -> None:
    bench = Bench("p0")
    bench.submit()
    bench.hear(Rejected("r", 1, code, "because", None))
    assert type(bench.error()) is kind
    assert "because" in bench.error().message


def test_a_prompt_that_fits_no_peer_is_the_clients_error() -> None:
    bench = Bench("p0", max_model_len=5)
    bench.submit()
    assert isinstance(bench.error(), ContextLengthExceeded)
    assert "6 tokens" in bench.error().message
    assert bench.names() == ["Failed", "PagesSafe"]


def test_slots_run_out() -> None:
    bench = Bench("p0", slots=3)
    bench.submit("a")
    bench.submit("b", page=10)
    assert isinstance(bench.error(), Overloaded)
    bench.submit("c", tokens=2, page=20)
    assert bench.state("c") is State.ASKED


def test_draining_takes_no_new_work_but_ends_what_runs() -> None:
    bench = Bench("p0", "p1")
    bench.submit()
    bench.do(Drain("bye"))
    assert [message for message in bench.sent() if isinstance(message, Bye)] == [Bye("bye")] * 2
    bench.submit("s", page=10)
    assert isinstance(bench.error(), Draining)
    bench.hear(Rejected("r", 1, "overloaded", "", None))
    assert bench.state() is State.ASKED
    bench.count_all(0)
    bench.count_all(1)
    assert Ready("r") in bench.effects
    bench.do(LinkUp(9, node_facts("p9", "prefill")))
    assert any(isinstance(message, Bye) for message in bench.sent())


def test_misuse_raises() -> None:
    bench = Bench("p0")
    bench.submit()
    with pytest.raises(ValueError, match="before"):
        bench.submit()
    with pytest.raises(ValueError, match="pages"):
        bench.do(Submit("s", [1, 2, 3], [1, 2]))
    with pytest.raises(ValueError, match="pages"):
        bench.do(Submit("s", [1], []))
    with pytest.raises(ValueError, match="up already"):
        bench.do(LinkUp(1, node_facts("p5", "prefill")))


# ---------------------------------------------------------------- ends


def test_cancelled_then_quiet_with_nothing_posted() -> None:
    bench = Bench("p0")
    bring(bench, State.RECEIVING)
    bench.do(CancelRequest("r"))
    assert bench.sent() == [Cancel("r", 1)]
    assert bench.machine.statistics()["pages_quarantined"] == 3
    assert bench.machine.statistics()["slots_quarantined"] == 2
    bench.hear(Quiet("r", 1, [0, 0]))
    assert bench.names() == ["DisarmSlot", "DisarmSlot", "PagesSafe"]
    assert bench.machine.idle


def test_cancelled_waits_for_exactly_what_was_posted() -> None:
    bench = Bench("p0")
    bring(bench, State.CANCELLING)
    bench.count(0, 2)
    bench.hear(Quiet("r", 1, [4, 1]))
    assert bench.state() is State.SETTLING
    bench.count(0, 4)
    assert bench.state() is State.SETTLING
    bench.count(1, 1)
    assert bench.names()[-1] == "PagesSafe"


def test_cancelled_but_all_landed() -> None:
    bench = Bench("p0")
    bring(bench, State.CANCELLING)
    bench.count_all(0)
    bench.count_all(1)
    assert bench.names()[-1] == "PagesSafe"
    assert bench.hear(Quiet("r", 1, [6, 3])) == []


def test_cancelled_and_rejected() -> None:
    bench = Bench("p0", "p1")
    bring(bench, State.CANCELLING)
    bench.hear(Rejected("r", 1, "overloaded", "", None))
    assert bench.names() == ["DisarmSlot", "DisarmSlot", "PagesSafe"]


def test_failed_with_what_was_posted() -> None:
    bench = Bench("p0")
    bring(bench, State.RECEIVING)
    bench.count(0, 3)
    bench.hear(FailedMessage("r", 1, "worker_failed", "rank 0 died", [4, 0], 2.0))
    assert isinstance(bench.error(), PeerError)
    assert bench.error().retry_after == 2.0
    assert "rank 0 died" in bench.error().message
    assert bench.state() is State.SETTLING
    bench.count(0, 4)
    assert bench.names()[-1] == "PagesSafe"


def test_failed_without_what_was_posted_is_fenced() -> None:
    bench = Bench("p0")
    bring(bench, State.RECEIVING)
    bench.hear(FailedMessage("r", 1, "fabric_error", "FI_EIO", None))
    assert bench.names() == ["Failed", "Fence"]
    bench.do(Fenced(1))
    assert bench.names() == ["DisarmSlot", "DisarmSlot", "PagesSafe", "Rehello"]


def test_quiet_with_less_than_all_is_a_failure() -> None:
    bench = Bench("p0")
    bring(bench, State.RECEIVING)
    bench.count(0, 6)
    bench.hear(Quiet("r", 1, [6, 0]))
    assert isinstance(bench.error(), PeerError)
    assert bench.names() == ["Failed", "DisarmSlot", "DisarmSlot", "PagesSafe"]


def test_a_lost_link_ends_its_requests_and_no_others() -> None:
    bench = Bench("p0", "p1")
    bench.submit("a")
    bench.submit("b", page=10)
    bench.do(LinkLost(1, FabricError("reset", name="FI_ECONNRESET")))
    assert bench.names() == ["Fence", "Failed"]
    assert isinstance(bench.error(), PeerLost)
    assert "p0" in bench.error().message
    assert "reset" in bench.error().message
    assert bench.state("a") is State.FENCING
    assert bench.state("b") is State.ASKED
    assert bench.machine.statistics()["links_fencing"] == 1
    # Late news of the lost link, and of the writes that still land, changes nothing.
    assert bench.do(LinkLost(1, PeerLost("again"))) == []
    assert bench.hear(Quiet("a", 1, [0, 0]), 1) == []
    assert bench.count_all(0, "a") == []
    assert bench.count_all(1, "a") == []
    assert bench.do(CancelRequest("a")) == []
    bench.do(Fenced(1))
    assert bench.names() == ["DisarmSlot", "DisarmSlot", "PagesSafe", "Rehello"]
    assert bench.do(Fenced(1)) == []


def test_a_port_that_closes_by_itself_is_fenced_too() -> None:
    bench = Bench("p0")
    bring(bench, State.RECEIVING)
    bench.do(Fenced(1))
    assert bench.names() == ["Failed", "DisarmSlot", "DisarmSlot", "PagesSafe", "Rehello"]


def test_the_newest_hello_wins() -> None:
    bench = Bench("p0")
    bring(bench, State.RECEIVING)
    bench.do(LinkUp(2, node_facts("p0", "prefill", incarnation=2)))
    assert bench.names()[:2] == ["Fence", "Failed"]
    bench.do(Fenced(1))
    assert Rehello("p0") not in bench.effects
    bench.submit("s", page=20)
    assert [effect.link for effect in bench.effects if isinstance(effect, Send)] == [2]


# ---------------------------------------------------------------- peers that break the rules

BREACHES: dict[str, Callable[[Bench], list[Effect]]] = {
    "accepted twice": lambda bench: bench.hear(Accepted("r", 1, 0)) + bench.hear(Accepted("r", 1, 0)),
    "rejected late": lambda bench: bench.hear(Rejected("r", 1, "overloaded", "", None)),
    "quiet": lambda bench: bench.hear(Quiet("r", 1, [6, 3])),
    "quiet of fewer slots": lambda bench: bench.hear(Quiet("r", 1, [6])),
    "quiet of too much": lambda bench: bench.hear(Quiet("r", 1, [6, 4])),
    "quiet of less than has landed": lambda bench: bench.count(0, 3) + bench.hear(Quiet("r", 1, [2, 0])),
    "failed": lambda bench: bench.hear(FailedMessage("r", 1, "x", "y", [0, 0])),
    "failed of too much": lambda bench: bench.hear(FailedMessage("r", 1, "x", "y", [7, 0])),
    "a write too many": lambda bench: bench.count(0, 7),
    "overshoot": lambda bench: bench.do(SlotOvershoot(*bench.slots["r"][1], 4)),
    "rejected after writing": lambda bench: (
        bench.count(0, 1) + bench.hear(Rejected("r", 1, "overloaded", "", None))
    ),
    "not its message": lambda bench: bench.hear(Cancel("r", 1)),
}
FAIR = {
    ("rejected late", State.ASKED),
    ("rejected late", State.CANCELLING),
    ("quiet", State.RECEIVING),
    ("quiet", State.CANCELLING),
    ("failed", State.RECEIVING),
    ("failed", State.CANCELLING),
    ("accepted twice", State.CANCELLING),
}
"""No breach: the peer may do that there."""


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_fences_the_peer_and_ends_the_request_once(breach: str, state: State) -> None:
    bench = Bench("p0")
    bring(bench, state)
    ended_before = state not in LIVE
    effects = BREACHES[breach](bench)
    if (breach, state) in FAIR:
        assert bench.machine.counters["breaches"] == 0
        return
    assert bench.machine.counters["breaches"] == 1
    assert [type(effect) for effect in effects].count(Fence) == 1
    assert [type(effect) for effect in effects].count(Failed) == (0 if ended_before else 1)
    assert not any(isinstance(effect, PagesSafe | Ready | DisarmSlot) for effect in effects)
    assert bench.state() is State.FENCING
    bench.do(Fenced(1))
    assert PagesSafe("r") in bench.effects
    assert bench.machine.idle


def test_more_than_was_posted_lands_while_settling() -> None:
    bench = Bench("p0")
    bring(bench, State.CANCELLING)
    bench.hear(Quiet("r", 1, [4, 1]))
    bench.count(0, 5)
    assert bench.names() == ["Fence"]
    assert bench.machine.counters["breaches"] == 1


def test_messages_about_other_attempts_are_stale() -> None:
    bench = Bench("p0", "p1")
    bench.submit()
    bench.hear(Rejected("r", 1, "overloaded", "", None), 1)
    for message in (Accepted("r", 1, 0), Quiet("r", 1, [0, 0]), Accepted("nobody", 1, 0)):
        assert bench.hear(message, 2) == []
    assert bench.hear(Accepted("r", 2, 0), 1) == []
    assert bench.machine.counters["stale_messages"] == 4
    assert bench.state() is State.ASKED


@pytest.mark.parametrize("last_word", [Quiet, FailedMessage])
def test_the_last_word_on_a_request_that_is_over_is_not_one_on_a_new_one_of_its_id(last_word: type) -> None:
    """Ready by count alone, the first is over here before its peer is done with it."""
    bench = Bench("p0")
    attempts = []
    for page in (1, 4):
        (prefill,) = (e.message for e in bench.submit(page=page) if isinstance(e, Send))
        assert isinstance(prefill, Prefill)
        attempts.append(prefill.attempt)
        bench.hear(Accepted("r", prefill.attempt, 0))
        if page == 1:
            bench.count_all(0)
            bench.count_all(1)
            assert bench.names()[-1] == "Ready"
    assert attempts[0] != attempts[1], "the peer would take the second for the first, sent twice"
    bench.hear(
        Quiet("r", attempts[0], [6, 3]) if last_word is Quiet else FailedMessage("r", attempts[0], "x")
    )
    assert bench.effects == []
    assert bench.state() is State.RECEIVING


def test_events_of_old_generations_are_ignored() -> None:
    bench = Bench("p0", slots=2)
    bring(bench, State.CANCELLING)
    old = bench.slots["r"][0]
    bench.hear(Quiet("r", 1, [0, 0]))
    bench.submit("s", page=10)
    assert bench.slots["s"][0] == (old[0], old[1] + 1)
    for event in (SlotCounted(*old), SlotProgress(*old, 3), SlotOvershoot(*old, 99), SlotCounted(77, 0)):
        assert bench.do(event) == []
    assert bench.machine.counters["ignored_events"] == 4


# ---------------------------------------------------------------- time


def test_a_cancel_without_an_answer_is_fenced_after_five_seconds() -> None:
    bench = Bench("p0")
    bring(bench, State.CANCELLING)
    assert bench.wait(4.75) == []
    assert "Fence" in [type(effect).__name__ for effect in bench.wait(0.5)]
    assert bench.state() is State.FENCING


@pytest.mark.parametrize("state", [State.LANDING, State.SETTLING])
def test_writes_that_never_land_are_fenced_after_two_seconds(state: State) -> None:
    bench = Bench("p0")
    bring(bench, state)
    assert bench.wait(1.75) == []
    bench.wait(0.5)
    assert bench.names() == (["Fence", "Failed"] if state is State.LANDING else ["Fence"])


@pytest.mark.parametrize("state", [State.ASKED, State.RECEIVING, State.LANDING])
def test_the_users_deadline(state: State) -> None:
    bench = Bench("p0")
    bench.submit(deadline_s=1.0)
    if state is not State.ASKED:
        bench.hear(Accepted("r", 1, 0))
    if state is State.LANDING:
        bench.hear(Quiet("r", 1, [6, 3]))
    bench.wait(1.25)
    assert bench.error().code == "deadline_exceeded"
    assert bench.state() is (State.SETTLING if state is State.LANDING else State.CANCELLING)
    assert (Cancel("r", 1) in bench.sent()) == (state is not State.LANDING)
    assert bench.do(CancelRequest("r")) == []
    bench.count_all(0)
    bench.count_all(1)
    assert bench.names()[-1] == "PagesSafe"


def test_a_deadline_that_no_longer_matters() -> None:
    bench = Bench("p0")
    bench.submit(deadline_s=1.0)
    bench.do(CancelRequest("r"))
    bench.hear(Quiet("r", 1, [0, 0]))
    assert bench.wait(2.0) == []


def test_a_silent_peer_is_dead_after_two_seconds_and_imms_are_signs_of_life() -> None:
    bench = Bench("p0")
    bring(bench, State.RECEIVING)
    for count in range(1, 6):
        bench.count(0, count)
        # Not heard otherwise, and its echoes are missing too: alive only as far as the echo goes.
        bench.wait(0.25, beats=0)
        assert bench.state() is State.RECEIVING
    bench.wait(2.5, beats=0)
    assert bench.state() is State.FENCING
    assert bench.machine.counters["deaths"] == 1


def test_a_node_that_slept_declares_nobody_dead() -> None:
    bench = Bench("p0")
    bring(bench, State.CANCELLING)
    bench.now += 3600
    assert bench.wait(0.25) == []
    assert bench.state() is State.CANCELLING
    assert bench.machine.statistics()["pauses"] == 1
    bench.wait(5.5)
    assert bench.state() is State.FENCING


def test_deadlines_are_told_in_the_callers_time() -> None:
    bench = Bench("p0")
    assert bench.machine.next_deadline() == bench.now + 0.25
    bench.now += 1000
    bench.do(Timer())
    due = bench.machine.next_deadline()
    assert due is not None
    assert bench.now < due <= bench.now + 0.25
    assert DecodeMachine(DecodeConfig(node_facts("d0", "decode"))).next_deadline() is None


def test_heartbeats_carry_the_load_and_the_echo() -> None:
    bench = Bench("p0")
    bench.submit()
    bench.hear(Heartbeat(41, 0))
    bench.now += 0.25
    (beat,) = [effect.message for effect in bench.do(Timer(Load(1.5, 20, 9))) if isinstance(effect, Send)]
    assert beat == Heartbeat(2, 41, Load(1.5, 20, 9, 1))


def test_the_story_is_bounded_and_in_order() -> None:
    machine = DecodeMachine(DecodeConfig(node_facts("d0", "decode"), story=3))
    for number in range(5):
        machine.handle(Fenced(number), float(number))
    assert [entry.event for entry in machine.story] == [Fenced(2), Fenced(3), Fenced(4)]


def test_the_impossible_raises() -> None:
    bench = Bench("p0")
    bench.submit()
    assert TRANSITIONS[State.ASKED, Happening.FENCED].action == "_impossible"
    with pytest.raises(AssertionError):
        bench.machine._apply(bench.machine._fetches["r"], Happening.FENCED)


@pytest.mark.parametrize(
    ("max_model_len", "num_pages", "longest"),
    [(100, 1000, 100), (1000, 8, 7 * 4 + 1), (29, 8, 29), (30, 8, 29)],
)
def test_the_longest_prompt_is_that_of_the_shorter_limit(
    max_model_len: int, num_pages: int, longest: int
) -> None:
    """The last token is not computed by a prefill node, so it needs no page there; it counts as length."""
    facts = msgspec.structs.replace(
        Bench("p0").machine.config.node,
        max_model_len=max_model_len,
        page_size=4,
        groups=(GroupFacts(tp=1, num_pages=num_pages),),
    )
    assert longest_prompt(facts) == longest
