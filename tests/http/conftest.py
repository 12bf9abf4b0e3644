from __future__ import annotations

import io
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from pdserve.http.app import build_app, make_runner
from pdserve.http.config import HttpConfig
from pdserve.text.tokenizer import Tokenizer
from tests import small_tokenizer
from tests.http.scripted import ScriptedFrontend


class Server:
    """A served scripted node and a client of it."""

    def __init__(
        self, frontend: ScriptedFrontend, host: str, port: int, session: aiohttp.ClientSession
    ) -> None:
        self.node = frontend
        self.host, self.port = host, port
        self.url = f"http://{host}:{port}"
        self.session = session

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer."""
        async with self.session.post(self.url + path, json=body, **options) as response:
            return response.status, orjson.loads(await response.read())

    async def post_raw(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Likewise, for a body as it is."""
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=io.BytesIO(body), headers=headers) as response:
            return response.status, orjson.loads(await response.read())

    async def get(self, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, orjson.loads(await response.read())

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a streamed answer: objects, and "[DONE]"."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            text = await response.text()
            assert response.status == 200, text
        events = text.split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") for event in events)
        return ["[DONE]" if e == "data: [DONE]" else orjson.loads(e[6:]) for e in events]


Serve = Callable[..., Awaitable[Server]]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small_tokenizer.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture
async def serve(tokenizer: Tokenizer) -> AsyncIterator[Serve]:
    """Starts a server over a scripted node; any number of them."""
    async with AsyncExitStack() as stack:

        async def start(config: HttpConfig | None = None, **card: Any) -> Server:
            node = ScriptedFrontend(tokenizer)
            for name, value in card.items():
                node.card = type(node.card)(**{**_as_dict(node.card), name: value})
            config = config or HttpConfig(shutdown_timeout=1.0)
            runner = make_runner(build_app(node, tokenizer, config, node.registry), config)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return Server(node, host, port, session)

        yield start


@pytest.fixture
async def server(serve: Serve) -> Server:
    return await serve()


def _as_dict(card: Any) -> dict[str, Any]:
    return {name: getattr(card, name) for name in card.__struct_fields__}
