"""Transfers do not wait for the forward pass, shown without a clock: the worker of the prefill node is held
after a layer of a chunk, and what has arrived on the decode node by then is exactly what was computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from pdserve.engine.request import Phase, Request
from pdserve.memory.counter import NO_GATE
from pdserve.messenger.messages import Heartbeat, Message, Quiet
from pdserve.node.node import Node
from tests.e2e.cluster import Cluster, idle, serving, until, wrapped
from tests.e2e.exactness import check_runs, clear_arena, read_pages
from tests.e2e.watch import Watch, generate

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

LAYERS = 6
CHUNK_PAGES = (4, 4, 2)
PROMPT = [(7907 * position) % 49000 + 20 for position in range(151)]
"""150 tokens are sent, in steps of 64: chunks of 4, 4 and 2 pages."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_model: Path) -> AsyncIterator[Cluster]:
    async with serving(
        tiny_model,
        gate=True,
        prefill={"max_num_batched_tokens": 64},
        num_pages=64,
        max_model_len=512,
        cluster={"dead_s": 60.0},
    ) as cluster:
        assert cluster.prefill[0].worker.ready.layers == LAYERS
        yield cluster


class HeldQuiet:
    """Keeps a prefill node's `Quiet` back."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Quiet]] = []

    @contextmanager
    def of(self, node: Node) -> Iterator[None]:
        def send(original: Callable[[int, Message], None]) -> Callable[[int, Message], None]:
            def hold(link: int, message: Message) -> None:
                if isinstance(message, Quiet):
                    self.messages.append((link, message))
                else:
                    original(link, message)

            return hold

        with wrapped(node.prefill, "send", send):
            yield


class Heard:
    """Counts what a decode node's messenger is told, by kind."""

    def __init__(self) -> None:
        self.count: dict[type[Message], int] = {}

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        def on_received(original: Callable[[int, Message], None]) -> Callable[[int, Message], None]:
            def note(link: int, message: Message) -> None:
                self.count[type(message)] = self.count.get(type(message), 0) + 1
                original(link, message)

            return note

        with wrapped(node.decode, "on_received", on_received):
            yield

    async def more(self, kind: type[Message], count: int, node: Node) -> None:
        wanted = self.count.get(kind, 0) + count
        await until(lambda: self.count.get(kind, 0) >= wanted, node)


def runs_before(chunk: int) -> int:
    return LAYERS * sum(CHUNK_PAGES[:chunk])


def check_arrived(
    source: Node, pages: list[int], target: Node, request: Request, chunk: int, layer: int
) -> None:
    """Of the chunks before, all layers; of this one, those up to `layer`; and nothing else.

    `pages`: the prefill node's page table, as far as it was planned.
    """
    first = sum(CHUNK_PAGES[:chunk])
    end = first + CHUNK_PAGES[chunk]
    here, there = read_pages(source, pages[:end]), read_pages(target, request.destination)
    check_runs(here[:, :first], there[:, :first])
    check_runs(here[: layer + 1, first:end], there[: layer + 1, first:end])
    for arrived in (there[:, :first], there[: layer + 1, first:end]):
        assert np.all(np.any(arrived != 0, axis=(2, 3, 4, 5))), "a page that has been counted is empty"
    assert not np.any(there[layer + 1 :, first:end]), "a layer that was not computed has arrived"
    assert not np.any(there[:, end:]), "a chunk that was not computed has arrived"


class Flight:
    """One request on its way from `source` to `target`, its worker held after a layer of a chunk."""

    def __init__(self, cluster: Cluster, chunk: int, layer: int) -> None:
        self.source, self.target = cluster.prefill[0], cluster.decode[0]
        self.chunk, self.layer = chunk, layer
        self.name = f"held after layer {layer} of chunk {chunk}"
        self.expected = runs_before(chunk) + CHUNK_PAGES[chunk] * (layer + 1)
        self.counter = self.source.worker.counter
        self.quiet, self.heard, self.watch = HeldQuiet(), Heard(), Watch()
        self._sent = self._received = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """From zeroed arenas on; the gate is armed, and open at the end."""
        source, target = self.source, self.target
        clear_arena(source)
        clear_arena(target)
        self._sent, self._received = source.prefill.runs_sent, target.decode.runs_received
        self.counter.hold_at = self.counter.value + self.chunk * (LAYERS + 1) + self.layer + 1
        try:
            with self.quiet.of(source), self.heard.at(target), self.watch.follow(source, target):
                yield
        finally:
            self.counter.hold_at = NO_GATE

    @property
    def sent(self) -> int:
        return self.source.prefill.runs_sent - self._sent

    @property
    def arrived(self) -> int:
        return self.target.decode.runs_received - self._received

    @property
    def under_way(self) -> int:
        return self.source.prefill.machine.statistics()["batches_outstanding"]

    def check_held(self) -> None:
        request = self.target.scheduler.get(self.name)
        assert request is not None
        assert request.phase is Phase.RECEIVING
        assert self.name not in self.watch.ready
        assert self.counter.value == self.counter.hold_at
        assert self.arrived == self.sent == self.expected
        assert self.under_way == 0
        pages = self.watch.pages[self.name]
        check_arrived(self.source, pages, self.target, request, self.chunk, self.layer)


@pytest.mark.parametrize(
    ("chunk", "layer"),
    [(0, 0), (0, 3), (0, LAYERS - 1), (1, 0), (1, 3), (1, LAYERS - 1), (2, 0), (2, LAYERS - 2)],
)
async def test_exactly_the_computed_layers_have_arrived(chunk: int, layer: int, cluster: Cluster) -> None:
    flight = Flight(cluster, chunk, layer)
    source, target = flight.source, flight.target
    await idle(source, target)
    with flight.held():
        async with asyncio.TaskGroup() as group:
            tokens = group.create_task(generate(target, flight.name, PROMPT, 3))
            try:
                await until(lambda: flight.arrived >= flight.expected and not flight.under_way, target)
                flight.check_held()
                # Messages sent meanwhile have come through, and still nothing else.
                await flight.heard.more(Heartbeat, 2, target)
                flight.check_held()
            finally:
                flight.counter.hold_at = NO_GATE
        # All tokens are out: the request has become ready by counting, whatever the prefill node said.
        assert len(tokens.result()) == 3
        assert Quiet not in flight.heard.count
        assert flight.arrived == flight.sent == runs_before(len(CHUNK_PAGES))
        await until(lambda: flight.quiet.messages, source)
        await idle(source, target)
        check_runs(flight.watch.source[flight.name], flight.watch.ready[flight.name])
    await deliver_late(flight.quiet, source, target)


async def test_tokens_come_out_while_the_prefill_worker_is_still_held(cluster: Cluster) -> None:
    """After the last layer of the last chunk everything has been sent. The prefill node's step has not ended,
    so it holds its pages and can't be quiet; nobody waits for it."""
    flight = Flight(cluster, len(CHUNK_PAGES) - 1, LAYERS - 1)
    source, target = flight.source, flight.target
    await idle(source, target)
    with flight.held():
        assert len(await generate(target, flight.name, PROMPT, 3)) == 3
        assert flight.counter.value == flight.counter.hold_at
        assert flight.arrived == flight.sent == flight.expected == runs_before(len(CHUNK_PAGES))
        assert not flight.quiet.messages
        assert flight.name not in flight.watch.source
        await idle(target)
        assert not source.idle
        flight.counter.hold_at = NO_GATE
        await until(lambda: flight.quiet.messages, source)
        await idle(source)
        check_runs(flight.watch.source[flight.name], flight.watch.ready[flight.name])
    await deliver_late(flight.quiet, source, target)


async def deliver_late(quiet: HeldQuiet, source: Node, target: Node) -> None:
    """The decode node has forgotten the request; its `Quiet` must change nothing."""
    ((link, message),) = quiet.messages
    assert message.posted == [runs_before(len(CHUNK_PAGES))]
    machine, pages = target.decode.machine, read_pages(target, range(target.worker.ready.num_pages))
    before, gauges = machine.statistics(), target.scheduler.statistics()
    heard = Heard()
    with heard.at(target):
        source.prefill.send(link, message)
        await until(lambda: heard.count.get(Quiet), target)
    after = machine.statistics()
    assert after.pop("stale_messages") == before.pop("stale_messages") + 1
    assert after == before
    assert target.scheduler.statistics() == gauges
    assert np.array_equal(read_pages(target, range(target.worker.ready.num_pages)), pages)
    await idle(source, target)
    assert source.url in {peer.url for peer in target.peers if peer.up}
