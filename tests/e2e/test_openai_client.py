"""The openai package against real nodes: a split pair, and a single node that does all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from pdserve.node.node import Node
from tests.e2e.cluster import node_config, running
from tests.e2e.pair import KEY, PAGE, PREFILL_MAX_LEN, Pair, tokens

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

MESSAGES: Any = [
    {"role": "system", "content": "You are a tiny model."},
    {"role": "user", "content": "Say something that nobody expects, " * 8},
]
PROMPT = "Once upon a time, there was a node that only ever computed prompts. " * 5


@pytest_asyncio.fixture(loop_scope="session")
async def client(pair: Pair) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=pair.sink.url + "/v1", api_key=KEY, max_retries=0, timeout=60
    ) as client:
        yield client
    await pair.nothing_left()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def single(tiny: Path) -> AsyncIterator[Node]:
    async with running(Node(node_config("both", tiny, num_pages=65, max_model_len=1000))) as node:
        yield node


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["m"]
    assert (await client.models.retrieve("m")).id == "m"


async def test_a_chat_is_streamed(client: openai.AsyncOpenAI) -> None:
    """The same text as without streaming, piece by piece, with the same usage."""
    asked: dict[str, Any] = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 10}
    whole = await client.chat.completions.create(**asked)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 3
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 10
    assert whole.usage.prompt_tokens > 64
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 10


async def test_a_completion_is_streamed(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 10}
    whole = await client.completions.create(**asked)
    stream = await client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == "length"


async def test_a_stream_that_is_closed_half_way_is_cancelled(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="m", prompt=PROMPT, max_tokens=300, stream=True)
    async for _ in stream:
        break
    await stream.close()  # the fixture finds both nodes idle


async def test_several_choices_and_prompts(client: openai.AsyncOpenAI) -> None:
    prompts = [tokens(3 * PAGE, 1), tokens(3 * PAGE + 1, 2)]
    asked: dict[str, Any] = {"model": "m", "temperature": 1.0, "seed": 5, "max_tokens": 6}
    answer = await client.completions.create(prompt=prompts, n=2, **asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 6 * PAGE + 1
    assert answer.usage.completion_tokens == 24
    alone = await client.completions.create(prompt=prompts[1], n=2, **asked)
    assert [choice.text for choice in alone.choices] == texts[2:]


async def test_stop_strings_end_the_text(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    text = (await client.completions.create(**asked)).choices[0].text
    stop = text[len(text) // 2 :][:6]
    answer = await client.completions.create(**asked, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text[: text.index(stop)]
    streamed = await client.completions.create(**asked, stop=stop, stream=True)
    pieces = [chunk.choices[0].text async for chunk in streamed if chunk.choices]
    assert "".join(pieces) == answer.choices[0].text


async def test_logprobs_of_the_tokens(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(
        model="m", messages=MESSAGES, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert len(content.content) == 5
    for token in content.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0
    assert "".join(token.token for token in content.content) == chat.choices[0].message.content
    text = await client.completions.create(model="m", prompt=PROMPT, temperature=0, max_tokens=5, logprobs=2)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == 5
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "warm": {"temperature": 1.5, "top_p": 0.9, "seed": 12},
    "top-k": {"temperature": 0.8, "seed": 13, "extra_body": {"top_k": 20, "min_p": 0.01}},
    "penalised": {"temperature": 1.0, "seed": 14, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "biased": {"temperature": 1.0, "seed": 15, "logit_bias": {"500": 5, "600": -100}},
    "repetition": {"temperature": 0, "extra_body": {"repetition_penalty": 1.5}},
}


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
async def test_a_seed_gives_the_same_text_split_and_single(
    client: openai.AsyncOpenAI, single: Node, options: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 12, "n": 2, **options}
    split = [[c.text for c in (await client.completions.create(**asked)).choices] for _ in range(2)]
    assert split[0] == split[1]
    async with openai.AsyncOpenAI(base_url=single.url + "/v1", api_key="none", max_retries=0) as other:
        alone = await other.completions.create(**asked)
        assert [choice.text for choice in alone.choices] == split[0]
    if options["temperature"]:
        assert split[0][0] != split[0][1]
        asked["seed"] = 99
        assert [c.text for c in (await client.completions.create(**asked)).choices] != split[0]


async def test_errors_have_their_types(client: openai.AsyncOpenAI, pair: Pair) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="500"):
        await client.completions.create(model="m", prompt=tokens(PREFILL_MAX_LEN + 1, 1), max_tokens=1)
    async with openai.AsyncOpenAI(base_url=pair.sink.url + "/v1", api_key="no", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.completions.create(model="m", prompt="a")
