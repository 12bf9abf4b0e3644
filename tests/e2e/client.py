"""A client on a connection of its own, which it can drop after any byte it has sent or read."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from pdserve.node.node import Node


class Client:
    """One HTTP/1.1 request, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str | None) -> None:
        self._reader = reader
        self._writer = writer
        self._key = key

    @classmethod
    async def connect(cls, node: Node) -> Client:
        host, port = node.url.removeprefix("http://").rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port)), node.config.server.api_key)

    async def post(self, path: str, body: dict[str, Any], *, missing: int = 0) -> None:
        """Send a request, all of it but the last `missing` bytes of its body."""
        encoded = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nHost: node\r\nContent-Type: application/json\r\n"
        if self._key is not None:
            head += f"Authorization: Bearer {self._key}\r\n"
        head += f"Content-Length: {len(encoded)}\r\n\r\n"
        self._writer.write(head.encode() + encoded[: len(encoded) - missing])
        await self._writer.drain()

    async def byte(self) -> bytes:
        """The first byte of the answer."""
        return await self._reader.readexactly(1)

    async def event(self) -> Any:
        """The next event of a stream: an object, or "[DONE]". EOFError where the connection ended instead."""
        while line := await self._reader.readline():
            if line.startswith(b"data: "):
                text = line[6:].strip()
                return "[DONE]" if text == b"[DONE]" else orjson.loads(text)
        raise EOFError("the stream ended")

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer that is not a stream."""
        status = int((await self._reader.readline()).split()[1])
        headers: dict[str, str] = {}
        while (line := (await self._reader.readline()).strip()) != b"":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, await self._reader.readexactly(int(headers["content-length"]))

    def leave(self, *, reset: bool) -> None:
        """Go: with a reset, or with an orderly close."""
        if reset:
            self._writer.transport.abort()
        else:
            self._writer.close()

    async def gone(self) -> None:
        """Wait until the connection is closed on this side."""
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass
