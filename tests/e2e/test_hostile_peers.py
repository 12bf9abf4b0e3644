"""Peers that know the secret and mean harm: a node refuses what they say and goes on serving others."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pdserve.errors import HelloRefused, PdserveError
from pdserve.messenger.facts import HelloFacts, RankMemory
from pdserve.messenger.hello import NONCE_BYTES, Initiator, Responder
from pdserve.messenger.messages import Message, Prefill
from pdserve.node.node import Node
from pdserve.node.peers import CHALLENGE_PATH, HELLO_PATH, PeerConnection
from tests.e2e.cluster import SECRET, wrapped
from tests.e2e.pair import Pair, completion_body, opened, tokens
from tests.e2e.seams import until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

COMPLETIONS = "/v1/completions"
LAST = 2**64 - 1

LIES: dict[str, dict[str, Any]] = {
    "an address that is none": {"addresses": (b"x",)},
    "an empty address": {"addresses": (b"",)},
    "an address of another family": {"addresses": (bytes([200, 200]) + bytes(14),)},
    "TCP port 0": {"addresses": (bytes([2, 0]) + bytes(14),)},
    "memory beyond all addresses": {"memory": (RankMemory(0, 0, 0, 1, LAST, 1 << 40),)},
    "memory of no rank": {"memory": (RankMemory(3, 7, 0, 1, 0, 1 << 40),)},
    "receive buffers of no use": {"receive_bytes": 256, "receive_buffers": 8},
}


def facts_of(node: Node, **changes: Any) -> HelloFacts:
    """What a node says of itself, and lies."""
    shell = node.decode or node.prefill
    assert shell is not None
    link = next(iter(shell.links.values()))
    known = link._peer_port.facts(
        shell.machine.config.node, node.fabric, offer_memory=node.decode is not None
    )  # type: ignore[arg-type]
    facts: HelloFacts = msgspec.structs.replace(known, **changes)
    return facts


def named(facts: HelloFacts, node_id: str) -> HelloFacts:
    renamed: HelloFacts = msgspec.structs.replace(
        facts, node=msgspec.structs.replace(facts.node, node_id=node_id)
    )
    return renamed


async def undisturbed(pair: Pair) -> None:
    """Both nodes still serve, over the link they had, and remember nothing."""
    body = completion_body(tokens(70, seed=3), max_tokens=2)
    assert await pair.ask(COMPLETIONS, body)
    await pair.nothing_left()


def answered_by(pair: Pair, facts: HelloFacts, link: int) -> PeerConnection:
    """The sink's connection to a prefill node that says `facts` and calls the link `link`."""
    known = pair.sink.peers[0]
    assert pair.sink.decode is not None
    assert pair.sink.fabric is not None
    connection = PeerConnection(
        "http://hostile",
        SECRET.encode(),
        known._facts,
        pair.sink.decode,
        pair.sink.fabric,
        pair.sink.counters,
        pair.sink.worker.arena.buffer,
        pair.sink._http,
        lambda: None,
    )
    responder = Responder(SECRET.encode())

    async def post(path: str, body: bytes) -> bytes:
        if path == CHALLENGE_PATH:
            return responder.challenge(body, secrets.token_bytes(NONCE_BYTES), time.monotonic())
        return responder.verify(body, time.monotonic()).accept(facts, link)[0]

    connection._post = post  # type: ignore[method-assign]
    return connection


async def say_hello(pair: Pair, facts: HelloFacts) -> None:
    """A decode node's hello to the source, with `facts`."""
    initiator = Initiator(SECRET.encode(), secrets.token_bytes(NONCE_BYTES))
    post = pair.sink.peers[0]._post
    reply = await post(CHALLENGE_PATH, initiator.challenge())
    initiator.finish(await post(HELLO_PATH, initiator.hello(reply, facts)))


@pytest.mark.parametrize("what", LIES)
async def test_a_prefill_node_that_lies_in_its_hello_costs_a_link_at_most(pair: Pair, what: str) -> None:
    assert pair.sink.decode is not None
    own, handles = set(pair.sink.decode.links), opened()
    facts = named(facts_of(pair.source, **LIES[what]), "liar")
    async with asyncio.timeout(20):
        await answered_by(pair, facts, secrets.randbits(64))._try()
    await until(lambda: opened() == handles, pair.sink)
    assert set(pair.sink.decode.links) == own
    await undisturbed(pair)


@pytest.mark.parametrize("what", LIES)
async def test_a_decode_node_that_lies_in_its_hello_costs_a_link_at_most(pair: Pair, what: str) -> None:
    assert pair.source.prefill is not None
    own, handles = set(pair.source.prefill.links), opened()
    facts = named(facts_of(pair.sink, **LIES[what]), "liar")
    problems: list[str] = []
    for _ in range(2):  # The second one finds what the first one left.
        async with asyncio.timeout(20):
            try:
                await say_hello(pair, facts)
            except PdserveError as error:
                problems.append(error.message)
    assert not [problem for problem in problems if "500" in problem]
    await until(lambda: opened() == handles, pair.source)
    assert set(pair.source.prefill.links) == own
    await undisturbed(pair)


async def test_a_prefill_node_cannot_take_another_ones_link_or_name(pair: Pair) -> None:
    known = pair.sink.peers[0].link
    assert known is not None
    handles = opened()
    theft = named(facts_of(pair.source), "thief"), known.id
    imposture = facts_of(pair.source), secrets.randbits(64)
    for facts, link in (theft, imposture):
        with pytest.raises(PdserveError, match=r"link id|node id") as refusal:
            await answered_by(pair, facts, link)._hello()
        assert isinstance(refusal.value, HelloRefused)
        assert pair.sink.peers[0].link is known
        assert not known.closed.is_set()
    assert opened() == handles
    await undisturbed(pair)


CHANGES: dict[str, Callable[[Prefill], dict[str, Any]]] = {
    "a token of no vocabulary": lambda m: {"tokens": [*m.tokens[:-2], 2**32 - 1, 5]},
    "the scrap page": lambda m: {"pages": [0, *m.pages[1:]]},
    "a page twice": lambda m: {"pages": [m.pages[1], *m.pages[1:]]},
    "a page beyond the arena": lambda m: {"pages": [2**32 - 1, *m.pages[1:]]},
    "another epoch": lambda m: {"epoch": m.epoch + 1},
    "a slot twice": lambda m: {"slots": [m.slots[1], *m.slots[1:]]},
    "no pages": lambda m: {"pages": []},
    "no slots": lambda m: {"slots": []},
    "no time": lambda m: {"remaining": 0.0},
    "utmost urgency": lambda m: {"priority": -(2**63)},
}


@pytest.mark.parametrize("what", CHANGES)
async def test_a_hostile_request_is_rejected_by_its_prefill_node(pair: Pair, what: str) -> None:
    def send(original: Callable[[int, Message], None]) -> Callable[[int, Message], None]:
        def changed(link: int, message: Message) -> None:
            if isinstance(message, Prefill):
                message = msgspec.structs.replace(message, **CHANGES[what](message))
            original(link, message)

        return changed

    body = completion_body(tokens(150, seed=5), max_tokens=2)
    with wrapped(pair.sink.decode, "send", send):
        async with pair.http.post(pair.sink.url + COMPLETIONS, json=body) as response:
            answer = await response.text()
            assert response.status == (200 if "urgency" in what else 502), answer
    await undisturbed(pair)
