"""What clients and strangers send that is wrong, to real nodes: a clear answer, before any work, and nothing
else is disturbed."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import pytest

from pdserve.errors import HelloRefused, PeerError
from pdserve.messenger.facts import NodeFacts
from pdserve.messenger.geometry import CacheGroup
from pdserve.messenger.hello import MAX_BODY, Challenge, Hello
from pdserve.node.node import Node
from pdserve.node.peers import CHALLENGE_PATH, HELLO_PATH, PeerConnection
from tests.e2e.cluster import SECRET, idle, linked, node_config, running
from tests.e2e.pair import (
    DECODE_PAGES,
    PAGE,
    PREFILL_MAX_LEN,
    Pair,
    completion_body,
    machine_reaches,
    opened,
    tokens,
)
from tests.e2e.seams import held_worker, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT = DECODE_PAGES * PAGE


def _completion(prompt: Any = (1, 2, 3), **fields: Any) -> tuple[str, bytes]:
    return COMPLETIONS, orjson.dumps({"model": "m", "prompt": prompt, **fields})


def _chat(messages: Any, **fields: Any) -> tuple[str, bytes]:
    return CHAT, orjson.dumps({"model": "m", "messages": messages, **fields})


# what: (path and body), status, the field that is named, what the text says
WRONG: dict[str, tuple[tuple[str, bytes], int, str | None, str]] = {
    "empty text": (_completion(""), 400, "prompt", "empty"),
    "no tokens": (_completion([]), 400, "prompt", "empty"),
    "an empty prompt of several": (_completion([[5, 6], []]), 400, "prompt[1]", "empty"),
    "no messages": (_chat([]), 400, "messages", "empty"),
    "no prompt": ((COMPLETIONS, b'{"model": "m"}'), 400, "prompt", "prompt"),
    "too long for decode": (_completion(tokens(LIMIT, 1), max_tokens=1), 400, "prompt", f"{LIMIT}"),
    "far too long a text": (_completion("word " * 300_000), 400, "prompt", f"{LIMIT}"),
    "too long a chat": (_chat([{"role": "user", "content": "word " * LIMIT}]), 400, "messages", f"{LIMIT}"),
    "too many tokens to make": (
        _completion(tokens(100, 1), max_tokens=LIMIT - 99),
        400,
        "max_tokens",
        f"at most {LIMIT - 100}",
    ),
    "too long for prefill": (
        _completion(tokens(PREFILL_MAX_LEN + 1, 1), max_tokens=1),
        400,
        "prompt",
        f"{PREFILL_MAX_LEN}",
    ),
    "a chat too long for prefill": (
        _chat([{"role": "user", "content": "word " * (PREFILL_MAX_LEN - 10)}], max_tokens=1),
        400,
        "messages",
        f"{PREFILL_MAX_LEN}",
    ),
    "a token out of the vocabulary": (_completion([1, 49152]), 400, "prompt[1]", "49151"),
    "a negative token": (_completion([-1]), 400, "prompt[0]", "-1"),
    "prompt is an object": (_completion({"text": "a"}), 400, "prompt", "prompt"),
    "prompt mixes types": (_completion(["a", [1]]), 400, "prompt[1]", "string"),
    "max_tokens is a string": (_completion(max_tokens="many"), 400, "max_tokens", "max_tokens"),
    "max_tokens is negative": (_completion(max_tokens=-5), 400, "max_tokens", "-5"),
    "max_tokens is zero": (_completion(max_tokens=0), 400, "max_tokens", "at least 1"),
    "n is negative": (_completion(n=-1), 400, "n", "-1"),
    "n is huge": (_completion(n=10**6), 400, "n", "at most 128"),
    "temperature is negative": (_completion(temperature=-1), 400, "temperature", "-1"),
    "temperature is a word": (_completion(temperature="hot"), 400, "temperature", "temperature"),
    "top_p is too large": (_completion(top_p=1.5), 400, "top_p", "1.5"),
    "logprobs is negative": (_completion(logprobs=-1), 400, "logprobs", "-1"),
    "min_tokens above max_tokens": (_completion(max_tokens=2, min_tokens=3), 400, "min_tokens", "at most 2"),
    "seed is too large": (_completion(seed=2**63), 400, "seed", "seed"),
    "stream is a word": (_completion(stream="yes"), 400, "stream", "stream"),
    "an unknown role": (_chat([{"role": "wizard", "content": "a"}]), 400, "messages[0].role", "wizard"),
    "content is a number": (_chat([{"role": "user", "content": 5}]), 400, "messages[0].content", "content"),
    "an unknown model": (
        (COMPLETIONS, b'{"model": "gpt", "prompt": "a"}'),
        404,
        "model",
        "gpt",
    ),
    "not JSON": ((COMPLETIONS, b'{"model": "m", "prompt": '), 400, None, "JSON"),
    "not UTF-8": ((COMPLETIONS, b'{"model": "\xff"}'), 400, None, ""),
    "an empty body": ((CHAT, b""), 400, None, "JSON"),
    "a list": ((CHAT, b"[1]"), 400, None, ""),
    "no such route": (("/v1/nothing", b"{}"), 404, None, "/v1/nothing"),
}


def reserved(node: Node) -> dict[str, Any]:
    """What work leaves behind: pages, requests, slots, links."""
    stats = node.scheduler.statistics()
    messenger = node.decode or node.prefill
    assert messenger is not None
    machine = messenger.machine.statistics()
    gauges = {k: v for k, v in machine.items() if k.startswith(("slots_", "requests_", "works_", "links_"))}
    return {
        "free": stats.pages_free,
        "submitted": stats.submitted_total,
        "links": sorted(messenger.links),
        **gauges,
    }


async def refused(pair: Pair, what: str) -> None:
    """One wrong request is answered as it should be."""
    (path, body), status, param, says = WRONG[what]
    headers = {"Content-Type": "application/json"}
    async with pair.http.post(pair.sink.url + path, data=io.BytesIO(body), headers=headers) as response:
        answer = orjson.loads(await response.read())
        assert response.status == status, (what, answer)
    error = answer["error"]
    assert error["param"] == param, (what, error)
    assert says in error["message"], (what, error)
    assert len(error["message"]) <= 1100, what


@pytest.mark.parametrize("what", WRONG)
async def test_a_wrong_request_is_refused_before_any_work(pair: Pair, what: str) -> None:
    await idle(*pair.nodes)
    before = [reserved(node) for node in pair.nodes]
    await refused(pair, what)
    assert [reserved(node) for node in pair.nodes] == before


@asynccontextmanager
async def innocent(pair: Pair) -> AsyncIterator[None]:
    """A request in the middle of its prefill, which ends as if nothing had happened."""
    body = completion_body(tokens(200, seed=9), max_tokens=6)
    expected = await pair.undisturbed(COMPLETIONS, body)
    with held_worker(pair.source, layer=1, step=1) as hold:
        answer = asyncio.ensure_future(pair.ask(COMPLETIONS, body))
        await until(lambda: hold.reached, pair.source)
        await machine_reaches(pair.sink, requests_receiving=1)
        before = [reserved(node) for node in pair.nodes]
        try:
            yield
            assert [reserved(node) for node in pair.nodes] == before
        except BaseException:
            answer.cancel()
            raise
    assert await answer == expected
    await pair.nothing_left()


async def test_wrong_requests_do_not_disturb_one_that_runs(pair: Pair) -> None:
    async with innocent(pair):
        for what in WRONG:
            await refused(pair, what)


async def test_the_longest_prompts_that_fit_are_served(pair: Pair) -> None:
    """The limits that the refusals name are the true ones, on either side."""
    longest = await pair.ask(COMPLETIONS, completion_body(tokens(PREFILL_MAX_LEN, 1), max_tokens=2))
    assert longest[0]
    room = LIMIT - 100
    assert len(await pair.ask(COMPLETIONS, completion_body(tokens(100, 1), max_tokens=room))) == 1
    await pair.nothing_left()


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer ", "sesame"])
async def test_an_api_key_is_asked_for(pair: Pair, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": key}
    body = completion_body("a", max_tokens=1)
    before = reserved(pair.sink)
    async with aiohttp.ClientSession(headers=headers) as http:
        for node in pair.nodes:
            async with http.post(node.url + COMPLETIONS, json=body) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
            async with http.get(node.url + "/health") as response:
                assert response.status == 200
    assert reserved(pair.sink) == before


async def test_a_prefill_node_generates_nothing_and_says_so(pair: Pair) -> None:
    body = completion_body("a", max_tokens=1)
    async with pair.http.post(pair.source.url + COMPLETIONS, json=body) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "wrong_role"


# ---------------------------------------------------------------- hello


def stranger(pair: Pair, secret: str = SECRET, **facts: Any) -> PeerConnection:
    """A decode node with the sink's fabric and arena, and other facts."""
    known = pair.sink.peers[0]
    own: NodeFacts = msgspec.structs.replace(known._facts, **{"node_id": "stranger", **facts})
    assert pair.sink.decode is not None
    assert pair.sink.fabric is not None
    return PeerConnection(
        pair.source.url,
        secret.encode(),
        own,
        pair.sink.decode,
        pair.sink.fabric,
        pair.sink.counters,
        pair.sink.worker.arena.buffer,
        pair.sink._http,
        lambda: None,
    )


UNFIT: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "another model": ({"model": "f" * 32}, "model fingerprint", ("f" * 32,)),
    "another page size": ({"page_size": 32}, "page size", ("16", "32")),
    "another dtype": ({"dtype": "float16"}, "KV dtype", ("float32", "float16")),
    "another layout": ({"layout": "[layer][page][K|V][head][token][dim]"}, "KV layout", ("[K|V][head]",)),
    "another segment size": ({"segment_tokens": 128}, "segment size", ("64", "128")),
    "another context size": ({"context_bytes": 256}, "context size", ("0", "256")),
    "other heads": (
        {"cache_groups": (CacheGroup("model", 4, 8, 128),)},
        "cache groups",
        ("8 heads", "2 heads"),
    ),
    "more layers": ({"cache_groups": (CacheGroup("model", 5, 2, 128),)}, "cache groups", ("5 layers",)),
    "a prefill node": ({"role": "prefill"}, "role", ("prefill",)),
    "an old version": ({"version": 99}, "protocol version", ("99",)),
    "another handover": ({"handovers": ("hidden",)}, "handover", ("hidden", "token")),
}


@pytest.mark.parametrize("what", UNFIT)
async def test_a_node_that_does_not_fit_is_refused_with_both_values(pair: Pair, what: str) -> None:
    facts, field, values = UNFIT[what]
    handles, before = opened(), [reserved(node) for node in pair.nodes]
    with pytest.raises(HelloRefused) as refusal:
        await stranger(pair, **facts)._hello()
    message = refusal.value.message
    assert message.startswith(field), message
    assert all(value in message for value in values), message
    assert [reserved(node) for node in pair.nodes] == before
    assert opened() == handles


async def test_a_wrong_secret_is_refused_and_logged_once(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    assert pair.source.hello_server is not None
    counted = pair.source.hello_server.hellos["refused"]
    async with innocent(pair):
        for _ in range(3):
            with pytest.raises(HelloRefused, match="cluster secret") as refusal:
                await stranger(pair, secret="not the secret of this cluster")._hello()
            assert refusal.value.code == "bad_secret"
    assert pair.source.hello_server.hellos["refused"] == counted + 3
    assert sum("cluster secret" in record.message for record in caplog.records) <= 1


async def test_garbage_said_as_hello_is_refused_and_costs_nothing(pair: Pair) -> None:
    source = random.Random(11)
    nonce = bytes(32)
    bodies = [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"nonce": 1}',
        b"\x91" * 100_000,
        bytes(MAX_BODY + 1),
        msgspec.msgpack.encode(Challenge(nonce)) + b"x",
        msgspec.msgpack.encode(Hello(nonce, nonce, b"facts", nonce)),
        msgspec.msgpack.encode(["hello", b"short", nonce, b"", nonce]),
        *[source.randbytes(source.randrange(1, 300)) for _ in range(40)],
    ]
    handles = opened()
    async with innocent(pair):
        for path in (CHALLENGE_PATH, HELLO_PATH):
            for body in bodies:
                async with pair.http.post(pair.source.url + path, data=io.BytesIO(body)) as response:
                    text = await response.text()
                    assert response.status in (400, 403), (path, body[:20], response.status, text)
                    assert len(text) < 1000
    assert opened() == handles


async def test_a_replayed_hello_is_refused_and_the_link_it_was_meant_for_stays(pair: Pair) -> None:
    peer = pair.sink.peers[0]
    said: list[tuple[str, bytes]] = []
    post = peer._post

    async def overheard(path: str, body: bytes) -> bytes:
        said.append((path, body))
        return await post(path, body)

    peer._post = overheard  # type: ignore[method-assign]
    try:
        assert peer.link is not None
        peer.link.lost(PeerError("a test wants to hear a hello"))
        await until(lambda: len(said) == 2 and peer.up, pair.sink)
    finally:
        del peer._post
    await idle(*pair.nodes)
    async with innocent(pair):
        for _ in range(2):
            for path, body in said:
                async with pair.http.post(pair.source.url + path, data=body) as response:
                    assert response.status == (200 if path == CHALLENGE_PATH else 403)
                    assert path == CHALLENGE_PATH or "challenge" in await response.text()


async def test_a_decode_node_of_another_model_says_so_and_serves_nothing(
    pair: Pair, other_tiny: Path
) -> None:
    config = node_config(
        "decode",
        other_tiny,
        peers=(pair.source.url,),
        num_pages=41,
        max_model_len=640,
        cluster={"segment_tokens": 64},
    )
    async with running(Node(config)) as node, aiohttp.ClientSession() as http:
        await until(lambda: node.peers[0].hellos["refused"] > 0, node)
        assert node.peers[0].hellos["accepted"] == 0
        async with http.get(node.url + "/health") as response:
            assert response.status == 503
            reason = (await response.json())["reason"]
        assert "model fingerprint" in reason
        assert node.peers[0]._facts.model in reason
        assert pair.sink.peers[0]._facts.model in reason
        async with http.post(
            node.url + COMPLETIONS, json=completion_body("hello you", max_tokens=2)
        ) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
            assert (await response.json())["error"]["code"] == "no_prefill_peer"
        await linked(pair.sink)
        await pair.nothing_left()
