"""Clients that go away, and clients that do not read: whatever they do, every generation is closed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from pdserve.http.config import HttpConfig
from pdserve.http.frontend import TokenOutput
from pdserve.observe.metrics import sample
from tests.http.conftest import Serve, Server

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@contextlib.asynccontextmanager
async def asking(
    server: Server, path: str, body: dict[str, Any]
) -> AsyncIterator[tuple[asyncio.StreamReader, Callable[[], None]]]:
    """A request on a connection of its own: its reader, and a way to break the connection off."""
    # A small window, so that a client that does not read is felt soon.
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    link.setblocking(False)
    await asyncio.get_running_loop().sock_connect(link, (server.host, server.port))
    reader, writer = await asyncio.open_connection(sock=link, limit=2**12)
    payload = json.dumps(body).encode()
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (path.encode(), len(payload), payload)
    )
    try:
        yield reader, writer.transport.abort
    finally:
        writer.transport.abort()


def aborted(server: Server) -> float:
    return sample(server.node.registry, "pdserve:request_success_total", {"finished_reason": "abort"}) or 0


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 4])
async def test_a_disconnect_closes_every_choice(server: Server, streamed: bool, n: int, tokens: int) -> None:
    """The client leaves while the prompt is being computed, or in the middle of the output."""
    never = asyncio.Event()
    server.node.script = lambda prompt, sampling: [*server.node.says("one two three four")[:tokens], never]
    body = {"prompt": "x", "stream": streamed, "n": n}
    async with asking(server, COMPLETION, body) as (reader, break_off):
        await server.node.until_asked(n)
        for generation in server.node.generations:
            await generation.waiting.wait()
        if streamed and tokens:
            await reader.readuntil(b"data: ")
        break_off()
        for generation in server.node.generations:
            await generation.closed.wait()
    assert [g.reasons[0] for g in server.node.generations] == ["abort"] * n
    assert aborted(server) == n


async def test_a_disconnect_while_the_node_admits(server: Server) -> None:
    """The second of two choices is not admitted yet when the client leaves: the first one is closed."""
    admitting, never = asyncio.Event(), asyncio.Event()
    generate = server.node.generate

    async def slow(*args: Any, **kwargs: Any) -> Any:
        if server.node.generations:
            admitting.set()
            await never.wait()
        return await generate(*args, **kwargs)

    server.node.generate = slow  # type: ignore[method-assign]
    async with asking(server, COMPLETION, {"prompt": "x", "n": 2}) as (_, break_off):
        await admitting.wait()
        break_off()
        await server.node.generations[0].closed.wait()
    assert len(server.node.generations) == 1


async def test_a_disconnect_after_the_end_changes_nothing(server: Server) -> None:
    await server.post(COMPLETION, {"prompt": "x"})
    assert [g.reasons for g in server.node.generations] == [["abort"]]
    assert aborted(server) == 0
    assert sample(server.node.registry, "pdserve:request_success_total", {"finished_reason": "stop"}) == 1


def endless(server: Server, count: int) -> Callable[..., list[TokenOutput]]:
    """Tokens with much to tell: `count` chunks of about 20 kB."""
    token = server.node.tokenizer.encode("a")[0]
    output = TokenOutput(token, -1.0, [(token, -1.0)] * 400)
    return lambda prompt, sampling: [*[output] * count, TokenOutput(token, -1.0, [], finish_reason="length")]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_does_not_read_is_cut_off(serve: Serve, n: int) -> None:
    """Its generation is not drained into memory: the handler waits with it, and then ends it."""
    server = await serve(HttpConfig(write_timeout=0.3, shutdown_timeout=1.0))
    server.node.script = endless(server, 100_000)
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "stream": True, "n": n}
    async with asking(server, CHAT, body):
        await server.node.until_asked(n)
        for generation in server.node.generations:
            await generation.closed.wait()
    # What was made fits into socket buffers; all of it would have been 2 GB.
    assert sum(g.given for g in server.node.generations) < 5_000
    assert aborted(server) == n
    assert {g.reasons[0] for g in server.node.generations} == {"abort"}


async def test_a_client_that_reads_slowly_gets_everything(serve: Serve) -> None:
    server = await serve(HttpConfig(write_timeout=30, shutdown_timeout=1.0))
    server.node.script = endless(server, 200)
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "stream": True}
    async with asking(server, CHAT, body) as (reader, _):
        seen, tail = 0, b""
        while b"data: [DONE]" not in tail:
            block = await reader.read(2**14)
            assert block
            seen += len(block)
            tail = tail[-100:] + block[-100:]
    assert seen > 200 * 10_000
    assert server.node.generations[0].given == 201


async def test_a_whole_answer_that_is_not_read_is_cut_off(serve: Serve) -> None:
    server = await serve(HttpConfig(write_timeout=0.1, shutdown_timeout=1.0))
    server.node.script = endless(server, 500)
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    with warned("cut off") as told:
        async with asking(server, CHAT, body) as (reader, _):
            await told.wait()
            received = 0
            with contextlib.suppress(ConnectionError):
                while block := await reader.read(2**20):
                    received += len(block)
    assert received < 500 * 10_000
    assert sample(server.node.registry, "pdserve:request_errors_total", {"code": "client_too_slow"}) == 1


@contextlib.contextmanager
def warned(words: str) -> Iterator[asyncio.Event]:
    """An event that is set when pdserve logs these words."""
    told = asyncio.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if words in record.getMessage():
                told.set()

    listener, logger = Listener(), logging.getLogger("pdserve")
    logger.addHandler(listener)
    try:
        yield told
    finally:
        logger.removeHandler(listener)
