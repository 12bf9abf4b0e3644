"""Two-process fixtures: this process's fabric, and a peer in a process of its own (spawned, never forked)."""

from __future__ import annotations

import asyncio
import json
import mmap
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.fabric import (
    Fabric,
    FabricConfig,
    FabricError,
    ImmCounters,
    MemoryRegion,
    Port,
    RemoteRegion,
    library,
    native_handles,
)

PEER = Path(__file__).with_name("peer.py")
PATIENCE = 20.0
"""Seconds after which something that must happen is said not to have. Decides nothing but hangs."""


@pytest.fixture(scope="session", autouse=True)
def _libfabric() -> None:
    """Loading reads the disk, so it is done outside the event loops."""
    library.load(None)


@pytest.fixture(autouse=True)
def _no_native_handles_left() -> Any:
    yield
    left = {name: count for name, count in native_handles().items() if count}
    assert not left


@pytest.fixture(params=["thread", "inline"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class RemotePeer:
    """The process behind tests/fabric/peer.py. Answers come in the order of the commands."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.remote: RemoteRegion
        self.address: bytes
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            message = json.loads(line)
            queue = self.events if "event" in message else self._answers
            queue.put_nowait(message)

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    async def answer(self) -> dict[str, Any]:
        message = await asyncio.wait_for(self._answers.get(), PATIENCE)
        return dict(message.get("answer", {}))

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return await self.answer()

    async def open(self) -> None:
        hello = await self.ask("open")
        self.address = bytes.fromhex(hello["address"])
        self.remote = RemoteRegion(hello["key"], hello["base"], hello["length"])

    async def connect(self, port: Port, region: MemoryRegion) -> None:
        await self.ask(
            "connect", address=port.address.hex(), key=region.key, base=region.base, length=region.length
        )

    def kill(self) -> None:
        self.process.kill()


@asynccontextmanager
async def remote_peer(mode: str, size: int, host: str = "127.0.0.1") -> AsyncIterator[RemotePeer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PEER),
        mode,
        host,
        str(size),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    peer = RemotePeer(process)
    reading = asyncio.create_task(peer.read())
    try:
        await peer.answer()
        yield peer
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), PATIENCE)
        except TimeoutError:
            process.kill()
            await process.wait()
        await reading


class Side:
    """This process's end: a fabric with its pump, one port, an arena, and what has been heard."""

    def __init__(self, fabric: Fabric, arena: mmap.mmap) -> None:
        self.fabric = fabric
        self.arena = arena
        self.counters = ImmCounters()
        self.port: Port
        self.region: MemoryRegion
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: asyncio.Queue[FabricError] = asyncio.Queue()

    async def open(self) -> None:
        self.port = await self.fabric.open_port(
            self.counters, name="peer", on_message=self.messages.put_nowait, on_lost=self.lost.put_nowait
        )
        self.region = self.port.register(self.arena)

    async def join(self, peer: RemotePeer) -> None:
        """A port on each side, each knowing the other's address and memory."""
        await self.open()
        await peer.open()
        self.port.connect(peer.address)
        await peer.connect(self.port, self.region)

    def arm(self, slot: int, generation: int, runs: int) -> asyncio.Future[int]:
        """A future with the count at the completion of the slot."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.counters.arm(
            slot,
            generation,
            runs,
            on_complete=lambda s: done.set_result(self.counters.count(s)),
            on_overshoot=lambda _, count: None if done.done() else done.set_result(count),
        )
        return done


@asynccontextmanager
async def local_side(mode: str, size: int, **settings: Any) -> AsyncIterator[Side]:
    arena = mmap.mmap(-1, size)
    config = FabricConfig(mode=mode, **{"dead_after_s": 1.0, **settings})  # type: ignore[arg-type]
    async with Fabric.open(config) as fabric:
        pump = asyncio.create_task(fabric.run(), name="fabric")
        try:
            yield Side(fabric, arena)
        finally:
            await fabric.close()
            await asyncio.wait_for(pump, PATIENCE)


Opened = tuple[Side, RemotePeer]
OpenPair = Callable[..., Awaitable[Opened]]


@pytest.fixture
async def open_pair(mode: str) -> AsyncIterator[OpenPair]:
    """Open both sides in the test's mode, joined; closed after the test."""
    async with AsyncExitStack() as stack:

        async def start(size: int = 1 << 20, host: str = "127.0.0.1", **settings: Any) -> Opened:
            peer = await stack.enter_async_context(remote_peer(mode, size, host))
            side = await stack.enter_async_context(local_side(mode, size, host=host, **settings))
            await side.join(peer)
            return side, peer

        yield start


async def soon(awaitable: Awaitable[Any]) -> Any:
    """The result, or a failure of the test when it never comes."""
    return await asyncio.wait_for(asyncio.ensure_future(awaitable), PATIENCE)
