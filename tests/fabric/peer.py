"""The other process of the fabric's contract tests: one port, driven by lines of JSON on stdin.

Usage: python peer.py MODE HOST. Each command is answered by one line of JSON, in order; what
happens by itself (a message, a loss) is printed as a line with "event".
"""

import asyncio
import json
import mmap
import sys
from array import array
from typing import Any

import numpy as np

from pdserve.fabric import (
    Fabric,
    FabricConfig,
    FabricError,
    ImmCounters,
    MemoryRegion,
    Port,
    RemoteRegion,
    WriteTable,
    native_handles,
)

ARENA = 16 << 20


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class Peer:
    port: Port
    region: MemoryRegion
    remote: RemoteRegion

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.arena = mmap.mmap(-1, ARENA)
        self.counters = ImmCounters()
        self.flooding: asyncio.Task[None] | None = None

    async def open(self, size: int) -> dict[str, Any]:
        self.port = await self.fabric.open_port(
            self.counters,
            name="tested",
            on_message=self.on_message,
            on_lost=lambda error: say(event="lost", name=error.name),
        )
        self.memory = memoryview(self.arena)[:size]
        self.region = self.port.register(self.memory)
        return {
            "address": self.port.address.hex(),
            "key": self.region.key,
            "base": self.region.base,
            "length": self.region.length,
        }

    async def reset(self) -> dict[str, Any]:
        """Back to what it was at the start."""
        if hasattr(self, "port"):
            await self.close()
            self.memory[:] = bytes(len(self.memory))
        return native_handles()

    def on_message(self, data: bytes) -> None:
        say(event="message", data=data.hex())

    async def connect(self, address: str, key: int, base: int, length: int) -> dict[str, Any]:
        self.port.connect(bytes.fromhex(address))
        self.remote = RemoteRegion(key, base, length)
        return {}

    async def fill(self, seed: int) -> dict[str, Any]:
        values = np.random.default_rng(seed).integers(0, 256, len(self.memory), np.uint8)
        np.frombuffer(self.memory, np.uint8)[:] = values
        return {}

    async def write(self, rows: list[int], src_shift: int = 0, dst_shift: int = 0) -> dict[str, Any]:
        batch = self.port.write_pages(
            self.region, self.remote, WriteTable(array("Q", rows)), src_shift=src_shift, dst_shift=dst_shift
        )
        try:
            await batch
        except FabricError as error:
            return {"error": error.name}
        return {"error": None, "posted_ns": batch.posted_ns, "done_ns": batch.done_ns}

    async def unchecked(self, rows: list[int], key: int, length: int) -> dict[str, Any]:
        """Write with a claim about the remote that need not be true."""
        remote = RemoteRegion(key, 0, length)
        batch = self.port.write_pages(self.region, remote, WriteTable(array("Q", rows)))
        try:
            await batch
        except FabricError as error:
            return {"error": error.name}
        return {"error": None}

    async def flood(self, rows: list[int]) -> dict[str, Any]:
        """Write the same table over and over until it fails."""
        table = WriteTable(array("Q", rows))

        async def forever() -> None:
            while True:
                batches = [self.port.write_pages(self.region, self.remote, table) for _ in range(4)]
                await asyncio.gather(*batches)

        async def until_lost() -> None:
            try:
                await forever()
            except FabricError as error:
                say(event="flood ended", name=error.name)

        self.flooding = asyncio.create_task(until_lost())
        return {}

    async def send(self, messages: list[str]) -> dict[str, Any]:
        futures = [self.port.send(bytes.fromhex(message)) for message in messages]
        results = await asyncio.gather(*futures, return_exceptions=True)
        errors = [r.name for r in results if isinstance(r, FabricError)]
        return {"errors": errors}

    async def close(self) -> dict[str, Any]:
        if self.flooding is not None:
            self.flooding.cancel()
        await self.port.close()
        return {"statistics": self.port.statistics()}

    async def handles(self) -> dict[str, Any]:
        return native_handles()


async def serve(mode: str, host: str) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    config = FabricConfig(mode=mode, host=host, dead_after_s=1.0)  # type: ignore[arg-type]
    async with Fabric.open(config) as fabric:
        pump = asyncio.create_task(fabric.run(), name="fabric")
        peer = Peer(fabric)
        while line := await reader.readline():
            command = json.loads(line)
            answer = await getattr(peer, command.pop("do"))(**command)
            say(answer=answer)
        if peer.flooding is not None:
            peer.flooding.cancel()
        pump.cancel()
    transport.close()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
