"""Peers that are not there yet, leave, die, stop and come back, with one decode node that stays.

What runs when a peer is lost is answered with a clear error or with its whole text; pages are given back only
when the port that the peer wrote through has been closed; and what is asked next is served, by whoever is
there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from pdserve.errors import WorkerError
from pdserve.messenger.events import Fenced, PagesSafe
from pdserve.node.node import Node
from pdserve.node.peers import HELLO_PATH
from tests.e2e.client import Client
from tests.e2e.cluster import Cluster, idle, linked, merge, node_config, running
from tests.e2e.pair import completion_body, nothing_remembered, statistics_reach, texts_of, tokens
from tests.e2e.process import NodeProcess, free_port
from tests.e2e.seams import held_worker, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

PATH = "/v1/completions"
LONG = completion_body(tokens(600, seed=1), max_tokens=4)
"""38 chunks of a page."""
SHORT = completion_body(tokens(40, seed=2), max_tokens=12)


class Stay(Cluster):
    """The decode node that stays, where its prefill node is expected, and what it answers undisturbed."""

    sink: Node
    url: str
    port: int
    model: Path
    folder: Path
    expected: dict[str, str]

    def prefill_node(self, *, shutdown_timeout: float = 5.0) -> Node:
        config = node_config(
            "prefill", self.model, num_pages=129, max_num_batched_tokens=16, max_model_len=1024
        )
        server = {"port": self.port, "shutdown_timeout": shutdown_timeout}
        return Node(merge(config, server=server), gate=True)

    def prefill_process(self, name: str) -> NodeProcess:
        log = self.folder / f"{name}.log"
        sizes = {"num_pages": 129, "max_num_batched_tokens": 16, "max_model_len": 1024}
        return NodeProcess("prefill", self.model, self.port, log, **sizes)

    async def post(self, body: dict[str, Any]) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and body of an answer."""
        async with self.http.post(self.sink.url + PATH, json=body) as response:
            return response.status, dict(response.headers), orjson.loads(await response.read())

    async def serves(self) -> None:
        """The decode node answers as it always does, and is left idle."""
        await linked(self.sink)
        for body in (SHORT, LONG):
            status, _, answer = await self.post(body)
            assert status == 200, answer
            assert texts_of(answer) == [self.expected[repr(body)]]
        await idle(self.sink)
        nothing_remembered(self.sink)

    async def unlinked(self) -> None:
        assert self.sink.decode is not None
        links = self.sink.decode.links
        await until(lambda: not links, self.sink)

    async def health(self) -> tuple[int, str]:
        async with self.http.get(self.sink.url + "/health") as response:
            return response.status, (await response.json())["reason"]


def pages_were_safe_by_fences(node: Node, since: float) -> bool:
    """Whether pages were given back since then, and only because a port was closed."""
    assert node.decode is not None
    reasons = [
        story.event
        for story in node.decode.machine.story
        if story.now >= since and any(isinstance(effect, PagesSafe) for effect in story.effects)
    ]
    return bool(reasons) and all(isinstance(event, Fenced) for event in reasons)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sink(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stay]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    sizes: dict[str, Any] = {"num_pages": 129, "max_model_len": 1024, "max_num_seqs": 4}
    sink = Node(node_config("decode", tiny, peers=(url,), **sizes), gate=True)
    reference = Node(node_config("both", tiny, **sizes))
    async with aiohttp.ClientSession() as http:
        stay = Stay(http)
        stay.sink, stay.url, stay.port, stay.model = sink, url, port, tiny
        stay.folder = tmp_path_factory.mktemp("nodes")
        async with running(reference):
            answers = [await stay.completion(reference, **_arguments(body)) for body in (SHORT, LONG)]
            stay.expected = {
                repr(body): texts_of(answer)[0] for body, answer in zip((SHORT, LONG), answers, strict=True)
            }
        async with running(sink):
            yield stay


@pytest_asyncio.fixture(loop_scope="module")
async def stay(sink: Stay) -> AsyncIterator[Stay]:
    """The decode node, without a link before and after."""
    await sink.unlinked()
    yield sink
    await sink.unlinked()


def _arguments(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("model", "temperature")}


@asynccontextmanager
async def asked(stay: Stay, body: dict[str, Any]) -> AsyncIterator[asyncio.Future[Any]]:
    """A request under way; the future has what `post` returns."""
    answer = asyncio.ensure_future(stay.post(body))
    try:
        yield answer
        await answer
    finally:
        answer.cancel()


async def test_without_a_prefill_node_it_says_so_and_serves_once_there_is_one(stay: Stay) -> None:
    status, headers, answer = await stay.post(SHORT)
    assert status == 503
    assert int(headers["Retry-After"]) >= 1
    assert answer["error"]["code"] == "no_prefill_peer"
    status, reason = await stay.health()
    assert status == 503
    assert stay.url in reason
    # One token needs nobody.
    status, _, answer = await stay.post(completion_body([7], max_tokens=3))
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
    await idle(stay.sink)
    async with running(stay.prefill_node()):
        await stay.serves()
        assert (await stay.health())[0] == 200


async def test_a_prefill_node_that_is_told_to_stop_finishes_what_it_has(stay: Stay) -> None:
    async with running(stay.prefill_node()) as source:
        await linked(stay.sink)
        with held_worker(source, layer=1, step=2) as hold:
            async with asked(stay, LONG) as answer:
                await until(lambda: hold.reached, source)
                source.stop()
                assert stay.sink.decode is not None
                machine = stay.sink.decode.machine
                await until(lambda: all(link.leaving for link in machine._links.values()), stay.sink)
                status, _, refused = await stay.post(SHORT)
                assert status == 503, refused
                async with stay.http.post(source.url + HELLO_PATH, data=b"") as hello:
                    assert hello.status == 503
                assert not answer.done()
                source.worker.counter.hold_at = 0
                status, _, body = await answer
        assert status == 200, body
        assert texts_of(body) == [stay.expected[repr(LONG)]]
    await idle(stay.sink)
    nothing_remembered(stay.sink)


async def test_a_prefill_node_that_cannot_finish_in_time_fails_its_requests(
    stay: Stay, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(stay.prefill_node(shutdown_timeout=0.0)) as source:
        await linked(stay.sink)
        with held_worker(source, layer=1, step=2) as hold:
            async with asked(stay, LONG) as answer:
                await until(lambda: hold.reached, source)
                source.stop()
                status, _, body = await answer
        assert status == 502, body
        assert "shutting down" in body["error"]["message"]
        assert "'works_running': 1" in caplog.text
    await idle(stay.sink)
    nothing_remembered(stay.sink)


async def test_a_killed_prefill_node_fails_what_it_was_sending_and_nothing_else(stay: Stay) -> None:
    assert stay.sink.decode is not None
    with stay.prefill_process("killed") as doomed:
        await doomed.answers(stay.http, stay.sink)
        await linked(stay.sink)
        with held_worker(stay.sink, step=3) as hold:
            async with asked(stay, SHORT) as decoding:
                await until(lambda: hold.reached, stay.sink)
                before, began = stay.sink.decode.runs_received, time.monotonic()
                client = await Client.connect(stay.sink)
                await client.post(PATH, {**LONG, "stream": True})
                # Whoever takes its worker's time away leaves it in the middle of the transfer.
                await until(lambda: stay.sink.decode.runs_received > before, stay.sink)  # type: ignore[union-attr]
                doomed.worker.suspend()
                await statistics_reach(stay.sink, receiving=1)
                doomed.send(signal.SIGKILL)
                status, _, answer = await client.answer()
                client.leave(reset=False)
                assert status == 502, answer
                error = orjson.loads(answer)["error"]
                assert error["code"] == "prefill_peer_lost"
                assert str(stay.port) in error["message"], error
                await statistics_reach(stay.sink, quarantined=0)
                assert pages_were_safe_by_fences(stay.sink, began)
                stay.sink.worker.counter.hold_at = 0
                status, _, body = await decoding
        assert status == 200
        assert texts_of(body) == [stay.expected[repr(SHORT)]]
        await idle(stay.sink)
        nothing_remembered(stay.sink)
        assert (await stay.health())[0] == 503
    with stay.prefill_process("after") as next_one:
        await next_one.answers(stay.http, stay.sink)
        await stay.serves()
        next_one.send(signal.SIGTERM)
        assert await next_one.ended(stay.sink) == 0, next_one.log.read_text()
        assert "ended in time" not in next_one.log.read_text()


async def test_a_stopped_prefill_node_is_dead_until_it_goes_on(stay: Stay) -> None:
    assert stay.sink.decode is not None
    machine = stay.sink.decode.machine
    with stay.prefill_process("stopped") as frozen:
        await frozen.answers(stay.http, stay.sink)
        await linked(stay.sink)
        deaths, before = machine.counters["deaths"], stay.sink.decode.runs_received
        began = time.monotonic()
        async with asked(stay, LONG) as answer:
            await until(lambda: stay.sink.decode.runs_received > before, stay.sink)  # type: ignore[union-attr]
            frozen.send(signal.SIGSTOP)
            status, _, body = await answer
        assert status == 502, body
        assert body["error"]["code"] == "prefill_peer_lost"
        assert "heard" in body["error"]["message"] or "echo" in body["error"]["message"]
        assert machine.counters["deaths"] == deaths + 1
        await idle(stay.sink)
        nothing_remembered(stay.sink)
        assert pages_were_safe_by_fences(stay.sink, began)
        frozen.send(signal.SIGCONT)
        await stay.serves()


async def test_a_killed_decode_node_costs_the_prefill_node_nothing(stay: Stay) -> None:
    async with running(stay.prefill_node()) as source:
        await linked(stay.sink)
        sizes = {"num_pages": 129, "max_model_len": 1024}
        port = free_port()
        log = stay.folder / "doomed.log"
        with NodeProcess("decode", stay.model, port, log, stay.url, **sizes) as doomed:
            await doomed.answers(stay.http, stay.sink)
            assert source.prefill is not None
            await until(lambda: len(source.prefill.links) == 2, source)  # type: ignore[union-attr]
            with held_worker(source, layer=1, step=2) as hold:
                abandoned = asyncio.ensure_future(stay.http.post(doomed.url + PATH, json=LONG))
                await until(lambda: hold.reached, source)
                doomed.send(signal.SIGKILL)
                with pytest.raises(aiohttp.ClientError):
                    await abandoned
                await until(lambda: source.prefill.machine.idle, source)  # type: ignore[union-attr]
                await until(lambda: len(source.prefill.links) == 1, source)  # type: ignore[union-attr]
                assert stay.sink.peers[0].up
            await idle(source)
            nothing_remembered(source)
            await stay.serves()
            await idle(source)
            nothing_remembered(source)


async def test_a_prefill_nodes_dead_worker_is_named_to_whoever_waits_for_it(stay: Stay) -> None:
    with pytest.raises(WorkerError, match=r"worker .* \(pid \d+\)"):  # noqa: PT012
        async with running(stay.prefill_node()) as source:
            await linked(stay.sink)
            with held_worker(source, layer=1, step=2) as hold:
                async with asked(stay, LONG) as answer:
                    await until(lambda: hold.reached, source)
                    pid = source.worker.pid
                    os.kill(pid, signal.SIGKILL)
                    status, _, body = await answer
            assert status == 502, body
            assert f"pid {pid}" in body["error"]["message"], body
    await idle(stay.sink)
    nothing_remembered(stay.sink)


async def test_a_decode_nodes_dead_worker_is_named_to_its_clients(stay: Stay) -> None:
    async with running(stay.prefill_node()) as source:
        with pytest.raises(WorkerError, match=r"worker .* \(pid \d+\)"):  # noqa: PT012
            config = node_config("decode", stay.model, peers=(stay.url,), num_pages=129, max_model_len=1024)
            async with running(Node(config, gate=True)) as doomed:
                await linked(doomed)
                with held_worker(doomed, step=3) as hold:
                    streaming = await Client.connect(doomed)
                    await streaming.post(PATH, {**SHORT, "stream": True})
                    await until(lambda: hold.reached, doomed)
                    await streaming.event()
                    pid = doomed.worker.pid
                    with held_worker(source, layer=1) as held:
                        waiting = await Client.connect(doomed)
                        await waiting.post(PATH, LONG)
                        await until(lambda: held.reached, source)
                        os.kill(pid, signal.SIGKILL)
                        status, _, answer = await waiting.answer()
                        assert status == 500, answer
                        assert f"pid {pid}".encode() in answer
                        while "error" not in (event := await streaming.event()):
                            pass
                        assert f"pid {pid}" in event["error"]["message"]
                        assert event["error"]["code"] == "worker_failed"
                        assert await streaming.event() == "[DONE]"
                    for client in (streaming, waiting):
                        client.leave(reset=False)
        await idle(source)
        nothing_remembered(source)
        await stay.serves()
