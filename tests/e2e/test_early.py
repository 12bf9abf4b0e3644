"""What reaches a decode node's port before the answer to its hello does.

The prefill node has its side of the link before it answers, so its first messages may overtake the answer;
and it may be gone again by then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from pdserve.errors import FabricError, PeerLost
from pdserve.node import peers
from pdserve.node.links import FabricLink, PeerPort
from pdserve.node.peers import HELLO_PATH
from tests.e2e.cluster import idle, linked
from tests.e2e.pair import Pair
from tests.e2e.seams import until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


@asynccontextmanager
async def answer_overtaken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[PeerPort], None]
) -> AsyncIterator[FabricLink]:
    """The pair says hello again; `meanwhile` is called once the prefill node's first message lies in the new
    port and before the answer is read. Yields the link that this made."""
    await idle(*pair.nodes)
    connection = pair.sink.peers[0]
    post, opened = connection._post, PeerPort.open
    ports: list[PeerPort] = []
    made: list[FabricLink] = []

    class Noted(PeerPort):
        @classmethod
        async def open(cls, *arguments: object, **named: object) -> PeerPort:
            ports.append(await opened(*arguments, **named))  # type: ignore[arg-type]
            return ports[-1]

    async def late(path: str, body: bytes) -> bytes:
        answer = await post(path, body)
        if path == HELLO_PATH and not made:
            await until(lambda: bool(ports[-1]._early), pair.sink)
            meanwhile(ports[-1])
        return answer

    assert pair.sink.decode is not None
    link_up = pair.sink.decode.link_up

    def note(link: FabricLink) -> None:
        made.append(link)
        link_up(link)

    with monkeypatch.context() as patch:
        patch.setattr(peers, "PeerPort", Noted)
        patch.setattr(connection, "_post", late)
        patch.setattr(pair.sink.decode, "link_up", note)
        assert connection.link is not None
        connection.link.lost(PeerLost("a test wants to hear a hello"))
        await until(lambda: bool(made), pair.sink)
        yield made[0]
    await linked(pair.sink)
    await pair.nothing_left()


async def test_what_a_peer_says_first_is_heard(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair.sink.decode is not None
    counters = pair.sink.decode.machine.counters
    stale = counters["stale_messages"]
    async with answer_overtaken(pair, monkeypatch, lambda port: None) as link:
        assert counters["stale_messages"] == stale
        assert pair.sink.decode.machine._links[link.id].liveness._last_beat_heard >= 1


async def test_a_port_that_is_lost_first_is_a_lost_link(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known at once, and not when the peer's silence has lasted long enough."""
    assert pair.sink.decode is not None
    machine = pair.sink.decode.machine
    deaths = machine.counters["deaths"]
    lost = FabricError("the peer is gone already", name="FI_ECONNRESET")
    async with answer_overtaken(pair, monkeypatch, lambda port: port._on_lost(lost)) as link:
        assert link.id not in machine._links or not machine._links[link.id].up
        await until(lambda: link.closed.is_set(), pair.sink)
    assert machine.counters["deaths"] == deaths


async def test_a_peer_with_an_impossible_address_costs_a_link_and_no_node(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_address(port: PeerPort) -> None:
        def refuse(address: bytes) -> None:
            raise ValueError("address: its TCP port is 0")

        monkeypatch.setattr(port.port, "connect", refuse)

    async with answer_overtaken(pair, monkeypatch, no_address) as link:
        await until(lambda: link.closed.is_set(), pair.sink)
