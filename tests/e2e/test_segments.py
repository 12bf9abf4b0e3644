"""Page tables as they come: several segments, merged runs, pages scattered on either side, both fabric modes.
All of it is invisible in the result.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.messenger.events import ArmSlot, Effect, PostWrites
from pdserve.node.node import Node
from tests.e2e.cluster import Cluster, serving, wrapped
from tests.e2e.watch import compare

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

PAGE = 16
SEGMENT_PAGES = 3
LAYERS = 6
PROMPT = [(7901 * position) % 49000 + 20 for position in range(11 * PAGE + 6)]
"""12 pages are sent, the last with 5 tokens, in four segments; steps of 80 tokens: chunks of 5, 5 and 2."""
CHUNKS = (5, 5, 2)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["thread", "inline"])
async def cluster(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Cluster]:
    async with serving(
        tiny_model,
        mode=request.param,
        prefill={"max_num_batched_tokens": 80},
        both={"max_num_batched_tokens": 50},
        num_pages=128,
        max_model_len=512,
        cluster={"dead_s": 60.0, "segment_tokens": SEGMENT_PAGES * PAGE},
    ) as cluster:
        for node in (*cluster.prefill, *cluster.decode):
            assert node.fabric is not None
            assert node.fabric.info.mode == request.param
        yield cluster


@contextmanager
def scattered(node: Node) -> Iterator[None]:
    """No two free pages of this node are neighbours."""
    pages = node.scheduler._pages
    held = pages.allocate(pages.available)
    pages.release(held[::2], -1)
    try:
        yield
    finally:
        pages.release(held[1::2], -1)


@dataclass
class Transfer:
    """What a pair of nodes did for the requests in the meantime."""

    slots: list[int] = field(default_factory=list)
    """Runs expected, by slot."""
    writes: int = 0
    runs: int = 0

    @contextmanager
    def of(self, cluster: Cluster) -> Iterator[None]:
        def armed(original: Callable[[Effect], None]) -> Callable[[Effect], None]:
            def note(effect: Effect) -> None:
                if isinstance(effect, ArmSlot):
                    self.slots.append(effect.runs)
                original(effect)

            return note

        def posted(original: Callable[[Effect], None]) -> Callable[[Effect], None]:
            def note(effect: Effect) -> None:
                if isinstance(effect, PostWrites):
                    self.writes += len(effect.table)
                    self.runs += effect.table.runs
                original(effect)

            return note

        with (
            wrapped(cluster.decode[0].decode, "perform", armed),
            wrapped(cluster.prefill[0].prefill, "perform", posted),
        ):
            yield


def merged_writes() -> int:
    """Writes of one layer where all pages are neighbours: one for each segment in each chunk."""
    owners = {
        (chunk, page // SEGMENT_PAGES)
        for chunk, count in enumerate(CHUNKS)
        for page in range(sum(CHUNKS[:chunk]), sum(CHUNKS[:chunk]) + count)
    }
    return len(owners)


@pytest.mark.parametrize("scatter", ["nothing", "source", "destination", "both"])
async def test_segments_and_page_tables_do_not_show(scatter: str, cluster: Cluster) -> None:
    transfer = Transfer()
    with ExitStack() as stack:
        if scatter in ("source", "both"):
            stack.enter_context(scattered(cluster.prefill[0]))
        if scatter in ("destination", "both"):
            stack.enter_context(scattered(cluster.decode[0]))
        outcomes = await compare(cluster, {scatter: PROMPT}, 4, check=False, plant=transfer.of(cluster))
    for node in cluster.nodes:
        node.check()
    outcomes[scatter].check()
    pages = sum(CHUNKS)
    segments = [SEGMENT_PAGES] * (pages // SEGMENT_PAGES)
    assert transfer.slots == [LAYERS * count for count in segments]
    assert transfer.runs == LAYERS * pages
    assert transfer.writes == LAYERS * (merged_writes() if scatter == "nothing" else pages)


async def test_many_at_once(cluster: Cluster) -> None:
    """Fifteen requests of one to seven pages share steps, segments of three pages and the free list."""
    prompts = {f"{n} tokens": [(n * 31 + 17 * i) % 49000 + 20 for i in range(n)] for n in range(1, 100, 7)}
    for outcome in (await compare(cluster, prompts, 6)).values():
        outcome.check()


async def test_the_same_over_http(cluster: Cluster) -> None:
    """Tokens as ids or as text, log-probabilities as JSON: the same answer, but for its id and time."""
    for prompt in (PROMPT[:40], "Fálame do tempo en Compostela, s'il vous plaît. 東京"):
        answers = [
            await cluster.completion(node, prompt, max_tokens=5, logprobs=5, ignore_eos=True)
            for node in (cluster.decode[0], cluster.both[0])
        ]
        for answer in answers:
            assert answer["usage"]["completion_tokens"] == 5
            assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == 5
            del answer["id"], answer["created"]
        assert answers[0] == answers[1]
