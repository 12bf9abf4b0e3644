"""The openai client against the routes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from pdserve.http.config import HttpConfig
from tests.http.conftest import Serve, Server

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


@pytest.fixture
async def keyed(serve: Serve) -> Server:
    return await serve(HttpConfig(api_keys=("key",), shutdown_timeout=1.0))


@pytest.fixture
async def client(keyed: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{keyed.url}/v1", api_key="key", max_retries=0) as client:
        yield client


async def test_a_streamed_chat(keyed: Server, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="small",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=64,
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    text, reasons, usage = "", [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert text == "hello world"
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert usage is not None
    assert usage.completion_tokens == len(keyed.node.generations[0].lines)
    assert usage.prompt_tokens_details is not None
    assert keyed.node.asked[0].sampling.top_k == 5
    assert keyed.node.asked[0].max_tokens == 64


async def test_a_streamed_completion(keyed: Server, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="small", prompt=["a", "b"], stream=True, n=2)
    texts: dict[int, str] = {}
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == dict.fromkeys(range(4), "hello world")


async def test_whole_answers(keyed: Server, client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="small", messages=MESSAGES, logprobs=False)  # type: ignore[arg-type]
    assert chat.choices[0].message.content == "hello world"
    assert chat.choices[0].message.role == "assistant"
    completion = await client.completions.create(model="small", prompt=[1, 2, 3])
    assert completion.choices[0].text == "hello world"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3


async def test_models(keyed: Server, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["small", "alias/small"]
    assert (await client.models.retrieve("small")).id == "small"


async def test_errors_are_the_clients_own_exceptions(keyed: Server, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=MESSAGES)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.completions.create(model="small", prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()


async def test_an_error_in_a_stream_is_raised(keyed: Server, client: openai.AsyncOpenAI) -> None:
    keyed.node.script = lambda prompt, sampling: [*keyed.node.says("hello")[:1], RuntimeError("x")]
    stream = await client.completions.create(model="small", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="internal error"):
        async for _ in stream:
            pass
