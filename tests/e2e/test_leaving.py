"""Clients that leave at every step of the life of a request (DESIGN: life of a request).

Each moment holds the nodes just there, so that it is the same moment in every run: the client leaves, both
nodes prove their invariants while whatever was under way still is, and then everything goes on. In the end no
page, slot or write is left on either node, and the next request, which is given the same pages, is answered
as if nothing had happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from pdserve.messenger.messages import Accepted, Cancel, Prefill, Quiet
from tests.e2e.client import Client
from tests.e2e.pair import Body, Pair, completion_body, machine_reaches, statistics_reach, tokens
from tests.e2e.seams import held_counts, held_messages, held_worker, held_writes, until
from tests.e2e.tiny import LAYERS

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OUTPUT = 8
WORDS = "snow apple river candle stone window forest letter garden silver"


@dataclass(frozen=True)
class Shape:
    """How a request is asked, and how its client goes."""

    path: str
    n: int
    stream: bool
    reset: bool

    def body(self) -> Body:
        """About 200 tokens of prompt: four chunks, 13 pages."""
        options: dict[str, Any] = {"max_tokens": OUTPUT, "n": self.n, "stream": self.stream}
        if self.path == COMPLETIONS:
            return completion_body(tokens(200, seed=1), **options)
        content = " ".join([WORDS] * 17)
        messages = [{"role": "user", "content": content}]
        return {"model": "m", "messages": messages, "temperature": 0, "ignore_eos": True, **options}


SHAPES = {
    "completion-stream": Shape(COMPLETIONS, 1, stream=True, reset=True),
    "completion-whole": Shape(COMPLETIONS, 1, stream=False, reset=False),
    "chat-n2-stream": Shape(CHAT, 2, stream=True, reset=False),
    "chat-n2-whole": Shape(CHAT, 2, stream=False, reset=True),
}

LARGE = completion_body(tokens(490, seed=2), max_tokens=4)
"""Eight chunks, and three quarters of the decode node's pages."""
SMALL_TWICE = completion_body(tokens(20, seed=3), max_tokens=4, n=2)
"""Takes both rows of the decode node."""
NEXT = completion_body(tokens(230, seed=4), max_tokens=OUTPUT, n=2)

Moment = Callable[[Pair, Shape], AbstractAsyncContextManager[Client]]
MOMENTS: dict[str, Moment] = {}


def moment(function: Callable[[Pair, Shape], AsyncIterator[Client]]) -> Moment:
    """Register a moment: enters with a client there, and lets go of the nodes when it is left."""
    made = asynccontextmanager(function)
    MOMENTS[function.__name__.replace("_", "-")] = made
    return made


async def asking(pair: Pair, shape: Shape) -> Client:
    client = await Client.connect(pair.sink)
    await client.post(shape.path, shape.body())
    return client


@asynccontextmanager
async def another(pair: Pair, body: Body) -> AsyncIterator[None]:
    """Somebody else's request, which stays and is answered as if alone."""
    expected = await pair.undisturbed(COMPLETIONS, body)
    answer = asyncio.ensure_future(pair.ask(COMPLETIONS, body))
    try:
        yield
        assert await answer == expected
    finally:
        answer.cancel()


@moment
async def sending_its_body(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    client = await Client.connect(pair.sink)
    await client.post(shape.path, shape.body(), missing=7)
    yield client


@moment
async def queued_on_decode(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """Another request has the pages."""
    await pair.undisturbed(COMPLETIONS, LARGE)
    with held_worker(pair.source, layer=1) as hold:
        async with another(pair, LARGE):
            await until(lambda: hold.reached, pair.source)
            client = await asking(pair, shape)
            await statistics_reach(pair.sink, waiting=shape.n)
            yield client
            await statistics_reach(pair.sink, waiting=0)
            pair.source.worker.counter.hold_at = 0


@moment
async def asked_and_not_heard(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """`Prefill` has left the machine and has not reached the prefill node."""
    assert pair.sink.decode is not None
    with held_messages(pair.sink.decode, Prefill, Cancel) as held:
        client = await asking(pair, shape)
        await until(lambda: len(held) == shape.n, pair.sink)
        yield client
        await machine_reaches(pair.sink, requests_cancelling=shape.n)


@moment
async def accepted_and_not_told(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """The prefill node has accepted and computes; the decode node has not heard of it."""
    assert pair.source.prefill is not None
    with held_messages(pair.source.prefill, Accepted, Quiet) as held, held_worker(pair.source, layer=1):
        client = await asking(pair, shape)
        await until(lambda: len(held) == shape.n, pair.source)
        yield client
        await machine_reaches(pair.sink, requests_cancelling=shape.n)


@moment
async def queued_on_prefill(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """Accepted, with another prompt's chunks before its own."""
    blocker = completion_body(tokens(200, seed=5), max_tokens=4)
    await pair.undisturbed(COMPLETIONS, blocker)
    one = Shape(shape.path, 1, shape.stream, shape.reset)  # two more would not fit beside the other
    with held_worker(pair.source, layer=1) as hold:
        async with another(pair, blocker):
            await until(lambda: hold.reached, pair.source)
            client = await asking(pair, one)
            await machine_reaches(pair.source, works_queued=1)
            await machine_reaches(pair.sink, requests_receiving=2)
            yield client
            await machine_reaches(pair.sink, requests_receiving=1, requests_cancelling=0)
            pair.source.worker.counter.hold_at = 0


@moment
async def inside_a_chunk(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """Layers 0 and 1 of its first chunk are computed and have left."""
    assert pair.sink.decode is not None
    before = pair.sink.decode.runs_received
    with held_worker(pair.source, layer=1) as hold:
        client = await asking(pair, shape)
        await until(lambda: hold.reached, pair.source)
        decode = pair.sink.decode
        await until(lambda: decode.runs_received == before + 2 * 4, pair.sink)
        yield client
        # The prefill node is quiet at once: the decode node need not wait for a step that is still computed.
        await until(lambda: pair.sink.idle, pair.sink)
        assert not pair.source.idle


@moment
async def between_chunks(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    with held_worker(pair.source, layer=LAYERS, step=1) as hold:
        client = await asking(pair, shape)
        await until(lambda: hold.reached, pair.source)
        yield client


@moment
async def partly_written(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """All computed; the writes of the last layers are still to come."""
    assert pair.source.prefill is not None
    with held_writes(pair.source.prefill, from_layer=LAYERS - 2) as held:
        client = await asking(pair, shape)
        await machine_reaches(pair.source, works_draining=shape.n)
        assert held
        yield client
        await machine_reaches(pair.sink, requests_cancelling=shape.n)


@moment
async def written_and_not_counted(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """The prefill node is quiet, and the decode node's counts have yet to be looked at."""
    assert pair.sink.decode is not None
    with held_counts(pair.sink.decode):
        client = await asking(pair, shape)
        await machine_reaches(pair.sink, requests_landing=shape.n)
        yield client
        await machine_reaches(pair.sink, requests_settling=shape.n)


@moment
async def counted_and_not_quiet(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """Ready by count alone; `Quiet` has not come."""
    assert pair.source.prefill is not None
    with held_messages(pair.source.prefill, Quiet) as held, held_worker(pair.sink) as hold:
        client = await asking(pair, shape)
        await until(lambda: len(held) == shape.n and hold.reached, pair.sink)
        yield client


@moment
async def waiting_for_a_row(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """Its KV is there; other sequences have all rows of the batch."""
    await pair.undisturbed(COMPLETIONS, SMALL_TWICE)
    with held_worker(pair.sink) as hold:
        async with another(pair, SMALL_TWICE):
            await until(lambda: hold.reached, pair.sink)
            await statistics_reach(pair.sink, running=2)
            client = await asking(pair, shape)
            await statistics_reach(pair.sink, ready=shape.n)
            yield client
            await statistics_reach(pair.sink, ready=0)
            pair.sink.worker.counter.hold_at = 0


@moment
async def before_the_first_token(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    with held_worker(pair.sink, layer=2) as hold:
        client = await asking(pair, shape)
        await until(lambda: hold.reached, pair.sink)
        yield client


@moment
async def in_the_middle(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    """Some tokens are out, and the next step is being computed."""
    with held_worker(pair.sink, step=3) as hold:
        client = await asking(pair, shape)
        await until(lambda: hold.reached, pair.sink)
        if shape.stream:
            await client.event()
        yield client


@moment
async def in_the_last_step(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    with held_worker(pair.sink, step=OUTPUT - 1, layer=LAYERS) as hold:
        client = await asking(pair, shape)
        await until(lambda: hold.reached, pair.sink)
        yield client


@moment
async def as_the_last_token_comes(pair: Pair, shape: Shape) -> AsyncIterator[Client]:
    client = await asking(pair, shape)
    if shape.stream:
        while not (await client.event())["choices"][0]["finish_reason"]:
            pass
    else:
        await client.byte()
    yield client


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("there", MOMENTS.values(), ids=MOMENTS)
async def test_nothing_is_left_of_a_client_that_leaves(pair: Pair, there: Moment, shape: Shape) -> None:
    expected = await pair.undisturbed(COMPLETIONS, NEXT)
    others = {"queued-on-decode", "queued-on-prefill", "waiting-for-a-row"}
    async with there(pair, shape) as client:
        staying = 0
        if there in [MOMENTS[name] for name in others]:
            staying = 2 if there is MOMENTS["waiting-for-a-row"] else 1
        client.leave(reset=shape.reset)
        await client.gone()
        await until(lambda: len(pair.sink.frontend.generations) == staying, pair.sink)
        for node in pair.nodes:
            node.check()
    await pair.nothing_left()
    assert await pair.ask(COMPLETIONS, NEXT) == expected
    await pair.nothing_left()


async def test_the_next_request_may_have_the_id_of_one_whose_pages_are_still_awaited(pair: Pair) -> None:
    """A client that leaves and asks again under the same X-Request-Id, while a peer may still write."""
    body = completion_body(tokens(200, seed=6), max_tokens=4, request_id="again")
    expected = await pair.undisturbed(COMPLETIONS, {**body, "request_id": "before"})
    with held_worker(pair.source, layer=1) as hold:
        client = await Client.connect(pair.sink)
        await client.post(COMPLETIONS, body)
        await until(lambda: hold.reached, pair.source)
        client.leave(reset=True)
        await until(lambda: not pair.sink.frontend.generations, pair.sink)
        answer = asyncio.ensure_future(pair.ask(COMPLETIONS, body))
        await until(lambda: bool(pair.sink.frontend.generations), pair.sink)
    assert await answer == expected
    await pair.nothing_left()


async def test_the_next_request_may_have_the_id_of_one_whose_quiet_is_still_to_come(pair: Pair) -> None:
    """The first was ready by count, answered and forgotten before its prefill node had ended its work."""
    body = completion_body(tokens(40, seed=7), max_tokens=1, request_id="same")
    expected = await pair.undisturbed(COMPLETIONS, {**body, "request_id": "other"})
    assert pair.source.prefill is not None
    link = pair.sink.peers[0].link
    with held_worker(pair.source, layer=LAYERS - 1) as hold:
        assert await pair.ask(COMPLETIONS, body) == expected
        assert hold.reached
        again = asyncio.ensure_future(pair.ask(COMPLETIONS, body))
        await until(lambda: bool(pair.sink.frontend.generations), pair.sink)
    assert await again == expected
    with held_messages(pair.source.prefill, Quiet, Accepted) as held:
        assert await pair.ask(COMPLETIONS, body) == expected
        await until(lambda: any(isinstance(message, Quiet) for message in held), pair.source)
        with held_counts(pair.sink.decode):
            again = asyncio.ensure_future(pair.ask(COMPLETIONS, body))
            await until(lambda: sum(isinstance(message, Accepted) for message in held) == 2, pair.source)
    assert await again == expected
    assert pair.sink.peers[0].link is link, "the link was lost"
    await pair.nothing_left()
