"""Two link ends joined by a wire that reorders, repeats, and is tampered with."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ProtocolError
from pdserve.messenger.link import ACK, MIN_DATAGRAM, OVERHEAD, Link, answer_unknown, read_header

KEY = b"k" * 32


@dataclass
class Pair:
    """Both ends, what is under way, and what came out."""

    window: int = 4
    datagram: int = MIN_DATAGRAM
    ends: list[Link] = field(init=False)
    bags: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    got: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))
    acks: int = 0

    def __post_init__(self) -> None:
        self.ends = [end(i == 0, self.window, self.datagram) for i in range(2)]

    def flush(self, side: int) -> None:
        out = self.ends[side].transmit()
        self.acks += sum(read_header(datagram).kind == ACK for datagram in out)
        assert all(len(datagram) <= self.datagram for datagram in out)
        self.bags[side].extend(out)

    def send(self, side: int, body: bytes) -> None:
        self.ends[side].send(body)
        self.flush(side)

    def deliver(self, side: int, index: int, again: bool = False) -> None:
        """A datagram sent by `side` arrives."""
        bag = self.bags[side]
        datagram = bag[index % len(bag)] if again else bag.pop(index % len(bag))
        other = 1 - side
        self.got[other].extend(self.ends[other].receive(datagram))
        self.flush(other)


def end(
    initiator: bool, window: int = 4, datagram: int = MIN_DATAGRAM, link: int = 7, key: bytes = KEY
) -> Link:
    return Link(link, key, initiator=initiator, datagram_bytes=datagram, window=window, peer_window=window)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 1), st.integers(0, 400)),
            st.tuples(st.sampled_from(["deliver", "repeat"]), st.integers(0, 1), st.integers(0, 1000)),
        ),
        max_size=120,
    ),
    st.integers(1, 6),
)
def test_in_order_exactly_once_whatever_the_wire_does(steps: list[tuple[str, int, int]], window: int) -> None:
    pair = Pair(window)
    sent: tuple[list[bytes], list[bytes]] = ([], [])
    for number, (what, side, value) in enumerate(steps):
        if what == "send":
            body = number.to_bytes(4, "little") + b"x" * value
            sent[side].append(body)
            pair.send(side, body)
        elif pair.bags[side]:
            pair.deliver(side, value, again=what == "repeat")
        for side, other in ((0, 1), (1, 0)):
            receiver = pair.ends[other].statistics()
            assert pair.ends[side].statistics()["sent"] - receiver["received"] <= window
            assert receiver["early"] < window
            assert pair.got[other] == sent[side][: len(pair.got[other])]
    while pair.bags[0] or pair.bags[1]:
        for side in (0, 1):
            if pair.bags[side]:
                pair.deliver(side, -1)
    assert (pair.got[1], pair.got[0]) == sent
    for link in pair.ends:
        assert link.statistics()["queued"] == 0
        assert link.statistics()["queued_bytes"] == 0
        assert link.statistics()["early"] == 0


def test_credits_flow_back_when_only_one_side_talks() -> None:
    """Pure acks cost no credit: a one-way flow of many windows never stalls, and acks don't answer acks."""
    pair = Pair(window=4)
    pair.send(0, b"a" * 64 * 100)
    turns = 0
    while pair.bags[0] or pair.bags[1]:
        turns += 1
        pair.deliver(0 if pair.bags[0] else 1, 0)
    assert pair.got[1] == [b"a" * 6400]
    assert pair.acks <= 100 // 2
    assert pair.ends[1].statistics()["sent"] == 0


def test_empty_messages_and_exact_fits() -> None:
    room = MIN_DATAGRAM - OVERHEAD
    pair = Pair(window=50)
    bodies = [b"", b"a" * room, b"b" * (room + 1), b"c" * 2 * room, b""]
    for body in bodies:
        pair.send(0, body)
    assert len(pair.bags[0]) == 1 + 1 + 2 + 2 + 1
    while pair.bags[0]:
        pair.deliver(0, -1)
    assert pair.got[1] == bodies


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255), st.booleans())
def test_one_changed_byte_is_noticed_and_changes_nothing(at: int, change: int, long: bool) -> None:
    sender, receiver = end(True, 8), end(False, 8)
    sender.send(b"hello" * (20 if long else 1))
    first, *rest = sender.transmit()
    before = receiver.statistics()
    tampered = bytearray(first)
    tampered[at % len(first)] ^= change
    with pytest.raises(ProtocolError) as caught:
        receiver.receive(bytes(tampered))
    assert caught.value.code in ("forged", "malformed", "rehello")
    assert {**receiver.statistics(), "forged": 0} == before
    messages = [message for datagram in (first, *rest) for message in receiver.receive(datagram)]
    assert messages == [b"hello" * (20 if long else 1)]


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    receiver = end(False)
    with pytest.raises(ProtocolError):
        receiver.receive(data)
    assert receiver.statistics()["received"] == 0


def test_a_datagram_belongs_to_its_link_key_and_direction() -> None:
    sender = end(True)
    sender.send(b"hello")
    (datagram,) = sender.transmit()
    for receiver, code in (
        (end(False, link=8), "malformed"),
        (end(False, key=b"j" * 32), "forged"),
        (end(True), "forged"),
    ):
        with pytest.raises(ProtocolError) as caught:
            receiver.receive(datagram)
        assert caught.value.code == code
    assert end(False).receive(datagram) == [b"hello"]


def test_a_peer_that_exceeds_its_credit_breaks_the_protocol() -> None:
    sender, receiver = end(True, 8), end(False, 2)
    for _ in range(3):
        sender.send(b"x")
    first, _second, third = sender.transmit()
    receiver.receive(first)
    receiver.receive(first)
    assert receiver.statistics()["duplicates"] == 1
    with pytest.raises(ProtocolError, match="beyond the 2 granted"):
        receiver.receive(third)


def test_sizes_are_bounded_on_both_sides() -> None:
    sender = Link(
        7, KEY, initiator=True, datagram_bytes=MIN_DATAGRAM, window=9, peer_window=9, max_message=300
    )
    with pytest.raises(ProtocolError, match="the limit is 300"):
        sender.send(b"x" * 301)
    receiver = Link(
        7, KEY, initiator=False, datagram_bytes=MIN_DATAGRAM, window=9, peer_window=9, max_message=100
    )
    sender.send(b"x" * 300)
    first, second, *_ = sender.transmit()
    receiver.receive(first)
    with pytest.raises(ProtocolError, match="more than 100 bytes"):
        receiver.receive(second)


def test_a_peer_that_takes_nothing_stalls_the_link_not_the_memory() -> None:
    sender = Link(
        7, KEY, initiator=True, datagram_bytes=MIN_DATAGRAM, window=1, peer_window=1, max_queued=1000
    )
    for _ in range(10):
        sender.send(b"x" * 100)
    with pytest.raises(ProtocolError) as caught:
        sender.send(b"x")
    assert caught.value.code == "link_stalled"


def test_an_unknown_link_is_answered_and_the_answer_is_not() -> None:
    sender = end(True)
    sender.send(b"hello")
    answer = answer_unknown(sender.transmit()[0])
    assert answer is not None
    assert answer_unknown(answer) is None
    with pytest.raises(ProtocolError) as caught:
        sender.receive(answer)
    assert caught.value.code == "rehello"
    with pytest.raises(ProtocolError) as caught:
        end(True, link=8).receive(answer)
    assert caught.value.code == "malformed"
