"""Two-process fixtures: this process's fabric, and a peer in a process of its own (spawned, never forked)."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
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
HOST = "127.0.0.1"
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
    """The process behind tests/fabric/peer.py, as one test sees it. Answers come in order."""

    def __init__(self, process: subprocess.Popen[bytes], size: int) -> None:
        self.process = process
        self.size = size
        self.remote: RemoteRegion
        self.address: bytes
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._reading: asyncio.Task[None]
        self._transport: asyncio.ReadTransport

    async def attach(self) -> None:
        assert self.process.stdout is not None
        # A duplicate: the transport closes what it is given, and the process outlives the test.
        pipe = os.fdopen(os.dup(self.process.stdout.fileno()), "rb", buffering=0)
        reader = asyncio.StreamReader(limit=1 << 24)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._reading = asyncio.create_task(self._read(reader))

    async def detach(self) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._transport.close()
        await asyncio.sleep(0)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            queue = self.events if "event" in message else self._answers
            queue.put_nowait(message)

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    async def answer(self) -> dict[str, Any]:
        message = await asyncio.wait_for(self._answers.get(), PATIENCE)
        return dict(message["answer"])

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return await self.answer()

    async def open(self) -> None:
        hello = await self.ask("open", size=self.size)
        self.address = bytes.fromhex(hello["address"])
        self.remote = RemoteRegion(hello["key"], hello["base"], hello["length"])

    async def connect(self, port: Port, region: MemoryRegion) -> None:
        await self.ask(
            "connect", address=port.address.hex(), key=region.key, base=region.base, length=region.length
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start_peer(mode: str, host: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(PEER), mode, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def stop_peer(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        process.stdout.close()


_kept: dict[str, subprocess.Popen[bytes]] = {}


@pytest.fixture(scope="session", autouse=True)
def _kept_peers() -> Iterator[None]:
    """One peer a mode, for all tests that leave it alive: starting Python costs more than most tests."""
    for mode in ("thread", "inline"):
        _kept[mode] = start_peer(mode, HOST)
    yield
    for process in _kept.values():
        assert stop_peer(process) == 0
    _kept.clear()


@asynccontextmanager
async def remote_peer(
    mode: str, size: int, host: str = HOST, *, fresh: bool = False
) -> AsyncIterator[RemotePeer]:
    """A peer with an arena of `size` bytes; `fresh`: in a process of this test alone, which may be killed."""
    own = fresh or host != HOST
    peer = RemotePeer(start_peer(mode, host) if own else _kept[mode], size)
    await peer.attach()
    try:
        await peer.ask("reset")
        yield peer
        if not own:
            handles = await peer.ask("reset")
            assert not any({**handles, "fabrics": 0}.values())
    finally:
        await peer.detach()
        if own:
            stop_peer(peer.process)


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

        async def start(
            size: int = 1 << 20, host: str = HOST, fresh: bool = False, **settings: Any
        ) -> Opened:
            peer = await stack.enter_async_context(remote_peer(mode, size, host, fresh=fresh))
            side = await stack.enter_async_context(local_side(mode, size, host=host, **settings))
            await side.join(peer)
            return side, peer

        yield start


async def soon(awaitable: Awaitable[Any]) -> Any:
    """The result, or a failure of the test when it never comes."""
    return await asyncio.wait_for(asyncio.ensure_future(awaitable), PATIENCE)
