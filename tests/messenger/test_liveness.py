"""Who is dead, and that nobody is because we slept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.messenger.liveness import Liveness, OwnTime
from pdserve.messenger.messages import Heartbeat, Load


@given(st.lists(st.integers(0, 800).map(lambda eighths: eighths / 8), max_size=50))
def test_own_time_never_goes_back_and_skips_pauses(gaps: list[float]) -> None:
    time, now, last = OwnTime(0.5), 10.0, 10.0
    assert time.at(now) == now
    for gap in gaps:
        now += gap
        own = time.at(now)
        assert own >= last - 1e-9
        assert own - last <= 0.5 + 1e-9
        last = max(own, last)
    assert time.pauses == sum(gap > 0.5 for gap in gaps)


def test_a_clock_that_goes_back_is_taken_for_one_that_stands() -> None:
    time = OwnTime(0.5)
    assert [time.at(now) for now in (5.0, 5.3, 5.1, 5.4)] == [5.0, 5.3, 5.3, 5.4]


def test_silence_is_death() -> None:
    peer = Liveness(0.25, 2.0, 0.0)
    assert peer.verdict(2.25) is None
    assert "nothing heard" in str(peer.verdict(2.3))
    peer.sign(2.05)
    assert peer.verdict(4.0) is None


def test_a_path_that_carries_one_direction_only_is_death() -> None:
    peer = Liveness(0.25, 2.0, 0.0)
    for tenth in range(20):
        peer.beat(Load(), tenth / 10)
        peer.received(Heartbeat(tenth + 1, 0), tenth / 10)
    assert peer.verdict(2.0) is None
    peer.received(Heartbeat(30, 0), 2.6)
    assert "echo" in str(peer.verdict(2.6))
    peer.received(Heartbeat(31, 20), 2.6)
    assert peer.verdict(4.5) is None


def test_a_slow_echo_is_no_death() -> None:
    """Always a second late, the peer echoes on and on."""
    peer = Liveness(0.25, 2.0, 0.0)
    for beat in range(1, 80):
        now = beat * 0.25
        mine = peer.beat(Load(), now)
        assert mine.echo == max(0, beat - 1)
        peer.received(Heartbeat(beat, max(0, beat - 4)), now)
        assert peer.verdict(now) is None


@pytest.mark.parametrize("begins", [0, 30, 60, 120, 180, 249])
@pytest.mark.parametrize("lasts", [300, 1500, 1700, 1999])
@pytest.mark.parametrize("reads_first", [True, False])
def test_a_peer_that_was_stopped_for_less_is_not_dead(begins: int, lasts: int, reads_first: bool) -> None:
    """Wherever in its beat it was stopped, and whether it reads or speaks first when it goes on. In ms."""
    ours, theirs = Liveness(0.25, 2.0, 0.0), Liveness(0.25, 2.0, 0.0)
    stopped = range(1000 + begins, 1000 + begins + lasts)
    unread: list[Heartbeat] = []
    for ms in range(5000):
        now = ms / 1000
        if ms % 250 == 0:
            unread.append(ours.beat(Load(), now))
        if ms not in stopped:
            if reads_first:
                read_all(theirs, unread, now)
            if theirs.next_beat <= now:
                ours.received(theirs.beat(Load(), now), now)
            read_all(theirs, unread, now)
        assert ours.verdict(now) is None


def read_all(peer: Liveness, unread: list[Heartbeat], now: float) -> None:
    for beat in unread:
        peer.received(beat, now)
    unread.clear()
