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
from pdserve.messenger.messages import Heartbeat, Message, Quiet
from pdserve.node.node import Node
from tests.e2e.cluster import Cluster, idle, receiver, sender, serving, wrapped
from tests.e2e.exactness import check_runs, clear_arena, read_pages
from tests.e2e.seams import held_messages, held_worker, until
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

        with wrapped(receiver(node), "on_received", on_received):
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
    """One request on its way from `source` to `target`, and what should have arrived with the worker held
    after a layer of a chunk."""

    def __init__(self, cluster: Cluster, chunk: int, layer: int) -> None:
        self.source, self.target = cluster.prefill[0], cluster.decode[0]
        self.chunk, self.layer = chunk, layer
        self.name = f"held after layer {layer} of chunk {chunk}"
        self.expected = runs_before(chunk) + CHUNK_PAGES[chunk] * (layer + 1)
        self.heard, self.watch = Heard(), Watch()
        self._sent, self._received = sender(self.source).runs_sent, receiver(self.target).runs_received

    @contextmanager
    def followed(self) -> Iterator[None]:
        """From zeroed arenas on."""
        clear_arena(self.source)
        clear_arena(self.target)
        with self.heard.at(self.target), self.watch.follow(self.source, self.target):
            yield

    @property
    def sent(self) -> int:
        return sender(self.source).runs_sent - self._sent

    @property
    def arrived(self) -> int:
        return receiver(self.target).runs_received - self._received

    @property
    def under_way(self) -> int:
        return int(sender(self.source).machine.statistics()["batches_outstanding"])

    def check_held(self) -> None:
        request = self.target.scheduler.get(self.name)
        assert request is not None
        assert request.phase is Phase.RECEIVING
        assert self.name not in self.watch.ready
        assert self.arrived == self.sent == self.expected
        assert self.under_way == 0
        pages = self.watch.pages[self.name]
        check_arrived(self.source, pages, self.target, request, self.chunk, self.layer)

    def check_source(self) -> None:
        check_runs(self.watch.source[self.name], self.watch.ready[self.name])


class Still:
    """What a decode node that is idle keeps of requests: nothing may change it but a request."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._before = self._look()

    def _look(self) -> tuple[object, ...]:
        machine = receiver(self._node).machine.statistics()
        self.stale_messages = machine.pop("stale_messages")
        del machine["pauses"]  # of this process, which says nothing of requests
        arena = read_pages(self._node, range(self._node.worker.ready.num_pages))
        return machine, self._node.scheduler.statistics(), arena.tobytes()

    def check(self) -> None:
        before = self.stale_messages
        assert self._look() == self._before
        assert self.stale_messages == before + 1
        self._node.check()


@pytest.mark.parametrize(
    ("chunk", "layer"),
    [(0, 0), (0, 3), (0, LAYERS - 1), (1, 0), (1, 3), (1, LAYERS - 1), (2, 0), (2, LAYERS - 2)],
)
async def test_exactly_the_computed_layers_have_arrived(chunk: int, layer: int, cluster: Cluster) -> None:
    source, target = cluster.prefill[0], cluster.decode[0]
    await idle(source, target)
    flight = Flight(cluster, chunk, layer)
    with flight.followed():
        with held_messages(sender(source), Quiet) as quiet:
            async with asyncio.TaskGroup() as group:
                with held_worker(source, layer=layer, step=chunk) as hold:
                    tokens = group.create_task(generate(target, flight.name, PROMPT, 3))
                    await until(lambda: flight.arrived >= flight.expected and not flight.under_way, target)
                    flight.check_held()
                    # Messages sent meanwhile have come through, and still nothing else.
                    await flight.heard.more(Heartbeat, 2, target)
                    flight.check_held()
                    assert hold.reached
            # All tokens are out: the request became ready by counting, whatever the prefill node said.
            assert len(tokens.result()) == 3
            assert Quiet not in flight.heard.count
            assert flight.arrived == flight.sent == runs_before(len(CHUNK_PAGES))
            await until(lambda: bool(quiet), source)
            await idle(source, target)
            flight.check_source()
            still = Still(target)
        await check_late_quiet(flight, quiet, still)


async def test_tokens_come_out_while_the_prefill_worker_is_still_held(cluster: Cluster) -> None:
    """After the last layer of the last chunk everything has been sent. The prefill node's step has not ended,
    so it holds its pages and can't be quiet; nobody waits for it."""
    source, target = cluster.prefill[0], cluster.decode[0]
    await idle(source, target)
    chunk, layer = len(CHUNK_PAGES) - 1, LAYERS - 1
    flight = Flight(cluster, chunk, layer)
    with flight.followed():
        with held_messages(sender(source), Quiet) as quiet:
            with held_worker(source, layer=layer, step=chunk) as hold:
                assert len(await generate(target, flight.name, PROMPT, 3)) == 3
                assert hold.reached
                assert flight.arrived == flight.sent == flight.expected == runs_before(len(CHUNK_PAGES))
                assert not quiet
                assert flight.name not in flight.watch.source
                await idle(target)
                assert not source.idle
            await until(lambda: bool(quiet), source)
            await idle(source)
            flight.check_source()
            still = Still(target)
        await check_late_quiet(flight, quiet, still)


async def check_late_quiet(flight: Flight, quiet: list[Quiet], still: Still) -> None:
    """`Quiet` was held back until its request was over; now it is on its way, and must change nothing."""
    (message,) = quiet
    assert message.posted == [runs_before(len(CHUNK_PAGES))]
    await until(lambda: flight.heard.count.get(Quiet) == 1, flight.target)
    still.check()
    await idle(flight.source, flight.target)
    assert all(peer.up for peer in flight.target.peers)
