"""DESIGN 12.4: the checks of the exactness test can fail.

Each fault is planted where parts meet (a message, a table of writes, an arena, the worker's own switch for an
early tick), and the same functions that pass without it must raise.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from pdserve.engine.request import Request
from pdserve.messenger.events import Effect, PostWrites
from pdserve.messenger.messages import Message, Prefill
from tests.e2e.cluster import Cluster, receiver, sender, serving, wrapped
from tests.e2e.exactness import Different, Pages, clear_arena, read_pages, write_pages
from tests.e2e.seams import held_worker, until
from tests.e2e.watch import Outcome, compare, differing

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = [(7919 * position) % 49000 + 20 for position in range(75)]
"""74 tokens are sent: five pages, the last with 10 tokens."""
MAX_TOKENS = 3
RUNS, READY, END, OUTPUTS = "runs", "kv at readiness", "kv at the end", "outputs"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tiny_model: Path) -> AsyncIterator[Cluster]:
    async with serving(
        tiny_model, both={}, gate=True, num_pages=64, max_model_len=512, cluster={"dead_s": 60.0}
    ) as cluster:
        yield cluster


@contextmanager
def in_message(cluster: Cluster, change: Callable[[Prefill], Prefill]) -> Iterator[None]:
    """What the decode node asks for is not what it wants."""

    def send(original: Callable[[int, Message], None]) -> Callable[[int, Message], None]:
        def changed(link: int, message: Message) -> None:
            original(link, change(message) if isinstance(message, Prefill) else message)

        return changed

    with wrapped(receiver(cluster.decode[0]), "send", send):
        yield


@contextmanager
def in_tables(cluster: Cluster, change: Callable[[array[int], int], None]) -> Iterator[None]:
    """The prefill node's writes go from or to a wrong place: `change(rows, bytes of a head of a page)`."""
    node = cluster.prefill[0]
    seen: list[object] = []

    def perform(original: Callable[[Effect], None]) -> Callable[[Effect], None]:
        def changed(effect: Effect) -> None:
            if isinstance(effect, PostWrites) and not any(table is effect.table for table in seen):
                seen.append(effect.table)
                change(effect.table.rows, node.worker.ready.page_bytes // node.worker.ready.kv_heads)
            original(effect)

        return changed

    with wrapped(sender(node), "perform", perform):
        yield


@contextmanager
def in_arena(cluster: Cluster, change: Callable[[Pages, Pages], None]) -> Iterator[None]:
    """The decode node's memory is wrong when the request becomes ready: `change(pages, as they were)`."""
    node = cluster.decode[0]
    earlier: dict[str, Pages] = {}

    def fetch(original: Callable[[Request], None]) -> Callable[[Request], None]:
        def noted(request: Request) -> None:
            earlier[request.id] = read_pages(node, request.destination)
            original(request)

        return noted

    def on_ready(original: Callable[[Request], None]) -> Callable[[Request], None]:
        def changed(request: Request) -> None:
            pages = read_pages(node, request.destination)
            change(pages, earlier[request.id])
            write_pages(node, request.destination, pages)
            original(request)

        return changed

    with wrapped(receiver(node), "fetch", fetch), wrapped(receiver(node), "on_ready", on_ready):
        yield


@contextmanager
def nothing(cluster: Cluster) -> Iterator[None]:
    """Every seam is used, and nothing is changed: the planting itself does no harm."""
    with (
        in_message(cluster, lambda message: message),
        in_tables(cluster, lambda rows, head_bytes: None),
        in_arena(cluster, lambda pages, earlier: None),
    ):
        yield


def swapped_pages(cluster: Cluster) -> AbstractContextManager[None]:
    def change(message: Prefill) -> Prefill:
        pages = list(message.pages)
        pages[1], pages[3] = pages[3], pages[1]
        return msgspec.structs.replace(message, pages=pages)

    return in_message(cluster, change)


def shifted_head(cluster: Cluster) -> AbstractContextManager[None]:
    def change(rows: array[int], head_bytes: int) -> None:
        for index in range(0, len(rows), 4):
            rows[index] += head_bytes

    return in_tables(cluster, change)


def stale_token(cluster: Cluster) -> AbstractContextManager[None]:
    """Position 37 has the KV of whoever had its page before."""

    def change(pages: Pages, earlier: Pages) -> None:
        pages[:, 2, :, :, 5] = earlier[:, 2, :, :, 5]

    return in_arena(cluster, change)


def stale_token_id(cluster: Cluster) -> AbstractContextManager[None]:
    """The prefill node computes another prompt than the client sent: what it sends arrives faithfully."""

    def change(message: Prefill) -> Prefill:
        tokens = list(message.tokens)
        tokens[37] += 1
        return msgspec.structs.replace(message, tokens=tokens)

    return in_message(cluster, change)


def flipped_byte(cluster: Cluster) -> AbstractContextManager[None]:
    """The lowest byte of one element of position 66."""

    def change(pages: Pages, earlier: Pages) -> None:
        pages[3, 4, 1, 1, 2, 7] ^= 0xFF

    return in_arena(cluster, change)


def flipped_byte_in_padding(cluster: Cluster) -> AbstractContextManager[None]:
    """Past the last token, where nobody reads: only the runs can tell."""

    def change(pages: Pages, earlier: Pages) -> None:
        pages[3, 4, 1, 1, 15, 7] ^= 0xFF

    return in_arena(cluster, change)


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Cluster], AbstractContextManager[None]]
    seen_by: set[str]
    """The checks that must raise."""
    not_seen_by: set[str] = field(default_factory=set)


FAULTS = {
    "swapped pages": Fault(swapped_pages, {RUNS, READY, END, OUTPUTS}),
    "shifted head": Fault(shifted_head, {RUNS, READY, END, OUTPUTS}),
    "stale token": Fault(stale_token, {RUNS, READY, END, OUTPUTS}),
    "stale token id": Fault(stale_token_id, {READY, END, OUTPUTS}, {RUNS}),
    "flipped byte": Fault(flipped_byte, {RUNS, READY, END}),
    "flipped byte in the padding": Fault(flipped_byte_in_padding, {RUNS}, {READY, END, OUTPUTS}),
}


async def serve(
    cluster: Cluster, plant: Callable[[Cluster], AbstractContextManager[None]] = nothing
) -> Outcome:
    """PROMPT, in pages where another prompt was before."""
    await compare(cluster, {"before": PROMPT[::-1]}, MAX_TOKENS)
    outcomes = await compare(cluster, {"planted": PROMPT}, MAX_TOKENS, plant=plant(cluster))
    return outcomes["planted"]


@pytest.mark.parametrize("name", FAULTS)
async def test_a_planted_fault_is_caught(name: str, cluster: Cluster) -> None:
    fault = FAULTS[name]
    outcome = await serve(cluster, fault.plant)
    with pytest.raises(Different):
        outcome.check()
    found = differing(outcome)
    assert fault.seen_by <= found
    assert not fault.not_seen_by & found
    (await serve(cluster)).check()


async def serve_held(cluster: Cluster, pair: Cluster) -> Outcome:
    """PROMPT through `pair`, whose worker is held after its first tick until that layer's pages have arrived.

    Where the tick comes before the layer, they arrive without its KV, however fast the worker is.
    """
    source, target = pair.prefill[0], pair.decode[0]
    received = receiver(target).runs_received
    pages = -(-(len(PROMPT) - 1) // source.worker.ready.page_size)
    clear_arena(source)
    async with asyncio.TaskGroup() as group:
        with held_worker(source):
            comparison = group.create_task(
                compare(cluster, {"held": PROMPT}, MAX_TOKENS, pair=(source, target)), name="comparison"
            )
            await until(lambda: receiver(target).runs_received == received + pages, target)
    return comparison.result()["held"]


async def test_a_held_worker_is_no_fault(cluster: Cluster) -> None:
    (await serve_held(cluster, cluster)).check()


async def test_an_early_tick_is_caught(cluster: Cluster, tiny_model: Path) -> None:
    async with serving(
        tiny_model,
        gate=True,
        fault="early_tick",
        num_pages=64,
        max_model_len=512,
        cluster={"dead_s": 60.0},
    ) as pair:
        outcome = await serve_held(cluster, pair)
    with pytest.raises(Different, match="run of layer 0, page 0"):
        outcome.check()
    assert {RUNS, READY, END} <= differing(outcome)
