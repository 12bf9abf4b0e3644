"""Hello: who may, who fits, and what tampering with any byte of it does."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ConfigError, HelloRefused, ProtocolError
from pdserve.messenger.facts import (
    GroupFacts,
    HelloFacts,
    NodeFacts,
    RankMemory,
    agree_version,
    refusal,
    unfit,
)
from pdserve.messenger.geometry import SPLIT_KV, CacheGroup
from pdserve.messenger.hello import Initiator, Responder, Session
from pdserve.messenger.link import open_link

from .world import node_facts

SECRET = b"cluster secret"
NONCES = (b"i" * 32, b"r" * 32)


def decode_hello(node: NodeFacts | None = None) -> HelloFacts:
    node = node or node_facts("d0", "decode", tp=2)
    memory = tuple(RankMemory(0, r, 0, 11 + r, 0, node.geometry(0).arena_bytes(r)) for r in range(2))
    return HelloFacts(node, (b"decode address",), memory)


def prefill_hello() -> HelloFacts:
    return HelloFacts(node_facts("p0", "prefill"), (b"prefill address",))


def meet(
    secrets: tuple[bytes, bytes] = (SECRET, SECRET),
    nonces: tuple[bytes, bytes] = NONCES,
    *,
    tamper: Callable[[int, bytes], bytes] = lambda _, body: body,
    refuse: str | None = None,
) -> tuple[Session, Session]:
    """Both round trips; `tamper(n, body)` sees each of the four bodies on its way."""
    initiator, responder = Initiator(secrets[0], nonces[0]), Responder(secrets[1])
    reply = responder.challenge(tamper(0, initiator.challenge()), nonces[1], 0.0)
    hello = initiator.hello(tamper(1, reply), decode_hello())
    verified = responder.verify(tamper(2, hello), 0.0)
    if refuse is not None:
        initiator.finish(tamper(3, verified.refuse(refuse)))
        raise AssertionError("not reached")
    answer, theirs = verified.accept(prefill_hello(), 0xABCDEF)
    return initiator.finish(tamper(3, answer)), theirs


def test_two_that_share_the_secret_share_a_session() -> None:
    ours, theirs = meet()
    assert ours.link == theirs.link == 0xABCDEF
    assert ours.key == theirs.key
    assert (ours.peer, theirs.peer) == (prefill_hello(), decode_hello())
    assert SECRET not in ours.key
    assert repr(ours.key) not in repr(ours)
    a, b = open_link(ours, decode_hello()), open_link(theirs, prefill_hello())
    a.send(b"hello")
    assert b.receive(a.transmit()[0]) == [b"hello"]
    b.send(b"back")
    assert a.receive(b.transmit()[0]) == [b"back"]


def test_every_hello_has_a_key_of_its_own() -> None:
    keys = {
        meet(nonces=nonces)[0].key
        for nonces in (NONCES, (b"j" * 32, b"r" * 32), (b"i" * 32, b"s" * 32), (b"r" * 32, b"i" * 32))
    }
    assert len(keys) == 4


@pytest.mark.parametrize("secrets", [(SECRET, b"other"), (b"other", SECRET), (SECRET + b"\0", SECRET)])
def test_another_secret_is_refused_by_the_responder(secrets: tuple[bytes, bytes]) -> None:
    with pytest.raises(HelloRefused) as caught:
        meet(secrets)
    assert caught.value.code == "bad_secret"


def test_the_initiator_refuses_a_responder_that_does_not_know_the_secret() -> None:
    initiator, impostor = Initiator(SECRET, NONCES[0]), Initiator(b"guess", NONCES[0])
    responder = Responder(b"guess")
    reply = responder.challenge(initiator.challenge(), NONCES[1], 0.0)
    initiator.hello(reply, decode_hello())
    verified = responder.verify(impostor.hello(reply, decode_hello()), 0.0)
    for answer in (verified.accept(prefill_hello(), 5)[0], verified.refuse("go away")):
        with pytest.raises(HelloRefused) as caught:
            initiator.finish(answer)
        assert caught.value.code == "bad_secret"


def test_an_empty_secret_is_no_secret() -> None:
    with pytest.raises(HelloRefused, match="empty"):
        Responder(b"")


def test_a_refusal_carries_its_reason() -> None:
    with pytest.raises(HelloRefused, match="page size: ours is 16, theirs is 64") as caught:
        meet(refuse="page size: ours is 16, theirs is 64")
    assert caught.value.code == "hello_refused"


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 3), st.integers(0, 1 << 16), st.integers(1, 255), st.booleans())
def test_tampering_never_makes_a_session(which: int, at: int, change: int, refuse: bool) -> None:
    """One changed byte in any of the four bodies: nobody gets a session, or nothing that counts changed."""

    def tamper(number: int, body: bytes) -> bytes:
        if number != which:
            return body
        changed = bytearray(body)
        changed[at % len(body)] ^= change
        return bytes(changed)

    try:
        ours, theirs = meet(tamper=tamper, refuse="no" if refuse else None)
    except (HelloRefused, ProtocolError):
        return
    # Only the advisory version of the two challenge bodies is outside the proofs.
    assert which in (0, 1)
    assert ours.key == theirs.key
    assert (ours.peer, theirs.peer) == (prefill_hello(), decode_hello())


def test_a_hello_can_not_be_replayed() -> None:
    initiator, responder = Initiator(SECRET, NONCES[0]), Responder(SECRET)
    body = initiator.hello(responder.challenge(initiator.challenge(), NONCES[1], 0.0), decode_hello())
    responder.verify(body, 0.0)
    for _ in range(2):
        with pytest.raises(HelloRefused) as caught:
            responder.verify(body, 0.0)
        assert caught.value.code == "bad_nonce"
    responder.challenge(initiator.challenge(), b"n" * 32, 0.0)
    with pytest.raises(HelloRefused):
        responder.verify(body, 0.0)


def test_a_wrong_proof_spends_its_challenge() -> None:
    responder = Responder(SECRET)
    stranger, friend = Initiator(b"guess", NONCES[0]), Initiator(SECRET, NONCES[0])
    reply = responder.challenge(friend.challenge(), NONCES[1], 0.0)
    with pytest.raises(HelloRefused, match="secret"):
        responder.verify(stranger.hello(reply, decode_hello()), 0.0)
    with pytest.raises(HelloRefused, match="challenge"):
        responder.verify(friend.hello(reply, decode_hello()), 0.0)


def test_strangers_cost_a_bounded_table() -> None:
    responder = Responder(SECRET, max_nonces=5, lifetime_s=10.0)
    for number in range(50):
        responder.challenge(Initiator(b"?", NONCES[0]).challenge(), number.to_bytes(32, "big"), 0.0)
        assert responder.open_challenges <= 5
    friend = Initiator(SECRET, NONCES[0])
    hello = friend.hello(responder.challenge(friend.challenge(), NONCES[1], 1.0), decode_hello())
    with pytest.raises(HelloRefused, match="challenge"):
        responder.verify(hello, 11.5)
    assert responder.open_challenges == 0


def test_answers_are_not_confused() -> None:
    """A proof says in which role and place it was given."""
    initiator, responder = Initiator(SECRET, NONCES[0]), Responder(SECRET)
    reply = responder.challenge(initiator.challenge(), NONCES[1], 0.0)
    hello = initiator.hello(reply, decode_hello())
    for wrong in (hello, reply, b"", msgspec.msgpack.encode(["hello_reply", 1, b"", b"x" * 32])):
        with pytest.raises((HelloRefused, ProtocolError)):
            initiator.finish(wrong)
    for wrong in (reply, initiator.challenge(), b"\xc1", b"\x91" * 5000):
        with pytest.raises(ProtocolError):
            responder.verify(wrong, 0.0)


def test_oversize_is_refused_before_parsing() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        Responder(SECRET).verify(b"\0" * (1 << 20 | 1), 0.0)


# ---------------------------------------------------------------- facts

OURS = node_facts("d0", "decode")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 3}, ["protocol version", "1", "3"]),
        ({"node_id": "d0"}, ["node id", "'d0'"]),
        ({"role": "decode"}, ["role", "'decode'"]),
        ({"role": "both"}, ["role", "'both'", "'decode'"]),
        ({"model": "x"}, ["model fingerprint", "'m'", "'x'"]),
        ({"cache_groups": (CacheGroup("model", 2, 4, 2),)}, ["cache groups", "2 heads", "4 heads"]),
        ({"layout": SPLIT_KV}, ["KV layout", "'head_major'", "'split_kv'"]),
        ({"dtype": "float16"}, ["KV dtype", "'float32'", "'float16'"]),
        ({"page_size": 4}, ["page size", "2", "4"]),
        ({"segment_tokens": 8}, ["segment size", "4", "8"]),
        ({"context_bytes": 64}, ["context size", "0", "64"]),
        ({"handovers": ("hidden",)}, ["handover", "'token'", "'hidden'"]),
        ({"groups": (GroupFacts(3, 9),)}, ["shape", "3", "2 KV heads"]),
        ({"groups": (GroupFacts(1, 9), GroupFacts(2, 9))}, ["shape", "[1, 2]"]),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(change: dict[str, object], words: list[str]) -> None:
    theirs = node_facts("p0", "prefill")
    assert refusal(OURS, theirs) is None
    reason = refusal(OURS, msgspec.structs.replace(theirs, **change))
    assert reason is not None
    for word in words:
        assert word in reason, reason


def test_what_is_arithmetic_may_differ() -> None:
    theirs = node_facts("p0", "prefill", tp=2, pages=999, max_model_len=7, incarnation=5, version=2)
    assert refusal(OURS, theirs) is None


@given(st.integers(0, 20), st.integers(0, 20))
def test_versions_one_apart_agree_on_the_lower(ours: int, theirs: int) -> None:
    agreed = agree_version(ours, theirs)
    assert agreed == (min(ours, theirs) if abs(ours - theirs) <= 1 else None)
    assert agreed == agree_version(theirs, ours)


@pytest.mark.parametrize(
    ("memory", "word"),
    [
        ((), "group 0 rank 0: none"),
        ((RankMemory(0, 0, 0, 1, 0, 1 << 20),), "group 0 rank 1: none"),
        ((RankMemory(0, 0, 0, 1, 0, 100),), "100 bytes"),
        ((RankMemory(0, 2, 0, 1, 0, 1 << 20),), "no such rank"),
        ((RankMemory(1, 0, 0, 1, 0, 1 << 20),), "no such rank"),
        ((RankMemory(0, 0, 1, 1, 0, 1 << 20),), "endpoint 1"),
        ((RankMemory(0, 0, 0, 1, 2**64 - 1, 1 << 20),), "beyond all addresses"),
    ],
)
def test_memory_must_be_what_the_node_says(memory: tuple[RankMemory, ...], word: str) -> None:
    prefill = node_facts("p0", "prefill")
    assert unfit(prefill, decode_hello()) is None
    reason = unfit(prefill, HelloFacts(node_facts("d0", "decode", tp=2), (b"a",), memory))
    assert reason is not None
    assert word in reason


def test_a_source_offers_no_memory() -> None:
    assert unfit(OURS, prefill_hello()) is None


def test_own_facts_are_checked_before_any_peer_hears_of_them() -> None:
    OURS.check()
    with pytest.raises(ConfigError, match="segment_tokens 5 is not a multiple of page_size 2"):
        node_facts("d0", "decode", segment_tokens=5).check()
    with pytest.raises(ConfigError, match="group 4"):
        OURS.geometry(4)
