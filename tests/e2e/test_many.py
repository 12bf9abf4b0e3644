"""Two prefill and two decode nodes in one process: many requests at once, and who is asked for what.

first decode node  -->  both prefill nodes
second decode node -->  the large prefill node
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdserve.fabric import open_handles
from pdserve.node.node import Node
from tests.e2e.client import Client
from tests.e2e.cluster import NOBODY, Cluster, idle, node_config, running_cluster
from tests.e2e.pair import busy_gauges, completion_body, nothing_remembered, texts_of, tokens
from tests.e2e.seams import held_worker, until
from tests.e2e.tiny import LAYERS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

PATH = "/v1/completions"
LARGE_PAGES, SMALL_PAGES = 32, 16
REQUESTS = 60


class Square(Cluster):
    """Two by two."""

    async def ask(self, node: Node, body: dict[str, Any]) -> str:
        async with self.http.post(node.url + PATH, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return texts_of(answer)[0]

    async def nothing_left(self) -> None:
        await idle(*self.nodes)
        for node in self.nodes:
            nothing_remembered(node)
            async with self.http.get(node.url + "/metrics") as response:
                assert busy_gauges(await response.text()) == {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def square(tiny: Path) -> AsyncIterator[Square]:
    """Lives for the module; nothing native is left of it. Lengths follow from pages alone."""
    before = open_handles()
    common: dict[str, Any] = {"max_model_len": None, "cluster": {"segment_tokens": 64}}
    small: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 4}
    prefill = [
        node_config("prefill", tiny, num_pages=pages + 1, **small, **common)
        for pages in (LARGE_PAGES, SMALL_PAGES)
    ]
    decode = [
        node_config("decode", tiny, peers=(NOBODY,), num_pages=pages + 1, **small, **common)
        for pages in (40, 35)
    ]
    async with running_cluster(prefill=prefill, decode=decode, peers=[(0, 1), (0,)], gate=True) as cluster:
        yield Square(cluster.http, cluster.prefill, cluster.decode)
    assert open_handles() == before


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    """Prompts of a token, about a page, several pages, and too many for the small prefill node."""
    lengths = [1, 2, 16, 17, 18, 33, 64, 100, 150, 240, 300, 400]
    return [
        completion_body(tokens(length, seed=length), max_tokens=3 + i) for i, length in enumerate(lengths)
    ]


async def left_after(node: Node, body: dict[str, Any], events: int) -> None:
    """A client that leaves after so many events."""
    client = await Client.connect(node)
    await client.post(PATH, {**body, "stream": True})
    for _ in range(events):
        if await client.event() == "[DONE]":
            break
    client.leave(reset=events % 2 == 0)
    await client.gone()


async def streamed(node: Node, body: dict[str, Any]) -> str:
    client = await Client.connect(node)
    await client.post(PATH, {**body, "stream": True})
    pieces = []
    while (event := await client.event()) != "[DONE]":
        assert "choices" in event, event
        pieces.append(event["choices"][0]["text"])
    client.leave(reset=False)
    return "".join(pieces)


@pytest.mark.parametrize("seed", [1, 2])
async def test_many_requests_at_once_are_answered_as_if_alone(
    square: Square, bodies: list[dict[str, Any]], seed: int
) -> None:
    expected = [await square.ask(square.decode[0], body) for body in bodies]
    source = random.Random(seed)
    answers: list[tuple[int, asyncio.Task[str]]] = []
    async with asyncio.TaskGroup() as group:
        for _ in range(REQUESTS):
            which, node = source.randrange(len(bodies)), source.choice(square.decode)
            kind = source.choice(["whole", "streamed", "leaves"])
            if kind == "leaves":
                group.create_task(left_after(node, bodies[which], source.randrange(6)))
            else:
                ask = square.ask if kind == "whole" else streamed
                answers.append((which, group.create_task(_asked(ask, node, bodies[which]))))
    for which, answer in answers:
        assert answer.result() == expected[which], f"prompt {which}"
    assert len(answers) > REQUESTS // 2
    await square.nothing_left()


async def _asked(ask: Any, node: Node, body: dict[str, Any]) -> str:
    text: str = await ask(node, body)
    return text


async def test_two_decode_nodes_share_a_prefill_node(square: Square) -> None:
    """Both have KV under way from it in the same step."""
    large = square.prefill[0]
    assert large.prefill is not None
    # Too long for the other prefill node, so there is no choice.
    body = completion_body(tokens(SMALL_PAGES * 16 + 2, 21), max_tokens=5)
    expected = await square.ask(square.decode[1], body)
    await idle(*square.nodes)
    with held_worker(large, layer=1, step=1):
        answers = [asyncio.ensure_future(square.ask(node, body)) for node in square.decode]
        machine = large.prefill.machine
        await until(lambda: len({key.link for key in machine._works}) == 2, large)
    assert [await answer for answer in answers] == [expected] * 2
    await square.nothing_left()


async def test_a_decode_node_asks_the_prefill_node_that_has_less_to_do(square: Square) -> None:
    """Told by heartbeats: also of what is in the batch already and not computed."""
    large, small = square.prefill
    sink = square.decode[0]
    assert large.prefill is not None
    assert small.prefill is not None
    assert sink.decode is not None
    body = completion_body(tokens(64, seed=22), max_tokens=2)
    long = completion_body(tokens(400, seed=23), max_tokens=2)
    expected = await square.ask(sink, body), await square.ask(square.decode[1], long)
    await idle(*square.nodes)
    with held_worker(large, layer=1):
        busy = asyncio.ensure_future(square.ask(square.decode[1], long))
        machine = sink.decode.machine
        await until(lambda: any(link.load.waiting_tokens > 64 for link in machine._links.values()), sink)
        before = small.prefill.runs_sent
        for count in range(1, 4):
            assert await square.ask(sink, body) == expected[0]
            assert small.prefill.runs_sent == before + count * 4 * LAYERS
    assert await busy == expected[1]
    await square.nothing_left()


async def test_with_equal_load_both_are_asked(square: Square) -> None:
    """In turn, but for what heartbeats tell meanwhile: of requests in a row each node gets some."""
    large, small = (node.prefill for node in square.prefill)
    assert large is not None
    assert small is not None
    before = large.runs_sent, small.runs_sent
    body = completion_body(tokens(33, seed=24), max_tokens=2)
    texts = [await square.ask(square.decode[0], body) for _ in range(8)]
    assert len(set(texts)) == 1
    sent = large.runs_sent - before[0], small.runs_sent - before[1]
    assert sum(sent) == 8 * 2 * LAYERS
    assert min(sent) > 0
    await square.nothing_left()


async def test_a_prompt_goes_where_it_fits(square: Square) -> None:
    """The small prefill node holds half of what the large one does, in pages."""
    large, small = (node.prefill for node in square.prefill)
    assert large is not None
    assert small is not None
    sent = small.runs_sent
    for _ in range(2):
        await square.ask(square.decode[0], completion_body(tokens(SMALL_PAGES * 16 + 2, 1), max_tokens=1))
    assert small.runs_sent == sent
    longest = LARGE_PAGES * 16 + 1
    await square.ask(square.decode[0], completion_body(tokens(longest, 2), max_tokens=1))
    body = completion_body(tokens(longest + 1, 3), max_tokens=1)
    async with square.http.post(square.decode[0].url + PATH, json=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == "prompt"
    assert str(longest) in error["message"]
    await square.nothing_left()
