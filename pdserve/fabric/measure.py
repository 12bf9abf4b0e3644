"""How fast a fabric is here: two ports of this process joined to a path, and what goes over it timed.

    near fabric   port + arena  ==== provider, loopback ====>  port + arena   far fabric

Times are taken where data arrives: pages when the last one is counted, not when the sender has let go of
them. Figures of one process are a floor: both ends share its event loop and, on a small machine, its cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import statistics
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from pdserve.errors import FabricError
from pdserve.fabric.batch import WriteBatch
from pdserve.fabric.config import FabricConfig
from pdserve.fabric.fabric import Fabric
from pdserve.fabric.imm import GENERATIONS, ImmCounters, pack_imm
from pdserve.fabric.port import Port
from pdserve.fabric.region import MemoryRegion
from pdserve.fabric.table import WriteTable

ARENA_BYTES = 8 << 20
"""Of each end; pinned while the path is open."""
PATIENCE_S = 5.0
"""What takes longer has failed. Decides nothing else."""

_HALF = ARENA_BYTES // 2
_WARM_UP = 16


@dataclass(frozen=True, slots=True)
class PathFigures:
    """One path. round_trip_us: median of a 64-byte message there and back. gbs: GB/s (10**9 bytes) by page
    size in bytes. fence_ms: to close a port that its peer is writing to at full speed."""

    provider: str
    domain: str
    round_trip_us: float
    gbs: dict[int, float]
    fence_ms: float


class _End:
    """One side: a port, an arena and what arrived."""

    def __init__(self, fabric: Fabric, on_lost: Callable[[FabricError], None]) -> None:
        self.fabric = fabric
        self.counters = ImmCounters()
        self.arena = mmap.mmap(-1, ARENA_BYTES)
        self.on_message: Callable[[bytes], object] = lambda _: None
        self.port: Port
        self.region: MemoryRegion
        self._on_lost = on_lost

    async def open(self, stack: AsyncExitStack) -> None:
        stack.callback(self.arena.close)
        self.port = await self.fabric.open_port(
            self.counters,
            name="self-test",
            on_message=self._received,
            on_lost=self._on_lost,
        )
        stack.push_async_callback(self.port.close)
        self.region = self.port.register(self.arena)

    def _received(self, data: bytes) -> None:
        self.on_message(data)


class Path:
    """Two joined ports. Made by `open_path`; one measurement at a time."""

    def __init__(self, near: Fabric, far: Fabric) -> None:
        self._near = _End(near, self._lost)
        self._far = _End(far, self._lost)
        self._generation = 0
        self._waiting: asyncio.Future[None] | None = None
        self._error: FabricError | None = None

    async def bandwidth(self, page: int, seconds: float) -> float:
        """GB/s of writes of `page` bytes (up to half an arena), over about `seconds`, two batches at least.

        FabricError when the path fails or stalls.
        """
        pages = max(1, min(64, _HALF // page))
        await self._until(self._write(0, page, pages)[1])  # connects, and takes both ends' page faults
        await self._until(self._write(1, page, pages)[1])
        start = time.monotonic()
        moved = 0
        # Two batches under way, one a half of the arena: no pause between them.
        arrivals = [self._write(0, page, pages)[1], self._write(1, page, pages)[1]]
        while arrivals:
            half = moved // (pages * page) % 2
            await self._until(arrivals.pop(0))
            moved += pages * page
            if time.monotonic() - start < seconds:
                arrivals.append(self._write(half, page, pages)[1])
        return moved / (time.monotonic() - start) / 1e9

    async def round_trip(self, size: int = 64, seconds: float = 0.2) -> float:
        """Microseconds for a message of `size` bytes there and back, through both event loops: the median
        over about `seconds`, or of one if that takes longer. FabricError as above."""
        near, far = self._near, self._far
        loop = asyncio.get_running_loop()
        took: list[int] = []
        far.on_message = far.port.send
        end = time.monotonic() + seconds
        while not took or time.monotonic() < end:
            back: asyncio.Future[None] = loop.create_future()
            near.on_message = lambda _, back=back: _wake(back)  # type: ignore[misc]
            start = time.monotonic_ns()
            near.port.send(bytes(size))
            await self._until(back)
            took.append(time.monotonic_ns() - start)
        near.on_message = far.on_message = lambda _: None
        return statistics.median(took[min(_WARM_UP, len(took) // 2) :]) / 1e3

    async def fence(self, page: int = 65536) -> float:
        """Milliseconds to close the receiving port while the other writes to it at full speed. Uses the path
        up. FabricError as above."""
        batch, first = self._write(0, page, _HALF // page)
        flood = [batch, *(self._write(1, page, _HALF // page, count=False)[0] for _ in range(3))]
        await self._until(first)
        start = time.monotonic()
        await self._far.port.close()
        took = time.monotonic() - start
        await self._near.port.close()
        for batch in flood:  # how they ended is the writer's affair: some were posted, the rest was dropped
            with contextlib.suppress(FabricError):
                await batch
        return took * 1e3

    async def _open(self, stack: AsyncExitStack) -> None:
        await self._near.open(stack)
        await self._far.open(stack)
        self._near.port.connect(self._far.port.address)
        self._far.port.connect(self._near.port.address)

    def _write(
        self, half: int, page: int, pages: int, *, count: bool = True
    ) -> tuple[WriteBatch, asyncio.Future[None]]:
        """Post one batch to a half of the arena; the future is its arrival. Slot `half` counts it."""
        self._generation = generation = (self._generation + 1) % GENERATIONS
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if count:
            self._far.counters.disarm(half)
            self._far.counters.arm(half, generation, pages, on_complete=lambda _: _wake(arrived))
        rows = array("Q")
        for index in range(pages):
            place = half * _HALF + index * page
            rows.extend((place, place, page, pack_imm(half, generation, 1)))
        near, far = self._near, self._far
        return near.port.write_pages(near.region, far.region.remote, WriteTable(rows)), arrived

    async def _until(self, future: asyncio.Future[None]) -> None:
        if self._error is not None:
            raise self._error
        self._waiting = future
        try:
            async with asyncio.timeout(PATIENCE_S):
                await future
        except TimeoutError:
            provider = self._near.fabric.info.provider
            raise FabricError(
                f"fabric: nothing arrived over {provider} for {PATIENCE_S:.0f} s", name="FI_ETIMEDOUT"
            ) from None
        finally:
            self._waiting = None

    def _lost(self, error: FabricError) -> None:
        self._error = error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)


@asynccontextmanager
async def open_path(near: Fabric, far: Fabric) -> AsyncIterator[Path]:
    """A path between two fabrics, which may be one and the same. `run()` of both must be running. Takes
    2 x `ARENA_BYTES` until the end. FabricError when ports can't be opened."""
    async with AsyncExitStack() as stack:
        path = Path(near, far)
        await path._open(stack)
        yield path


async def measure(
    config: FabricConfig, *, pages: tuple[int, ...] = (65536, 1 << 20), seconds: float = 0.3
) -> PathFigures:
    """All figures of one path, between two fabrics opened for it; `seconds` a page size and about 0.3 more.

    FabricError when it can't be opened or fails on the way. Cancelling closes everything.
    """
    near, far = Fabric.open(config), None
    try:
        far = Fabric.open(config)
        async with asyncio.TaskGroup() as tasks:
            for fabric in (near, far):
                tasks.create_task(fabric.run(), name="self-test pump")
            try:
                return await _measure(near, far, pages, seconds)
            finally:
                await near.close()  # run() returns
                await far.close()
    except BaseExceptionGroup as group:
        error = _first(group)
        if error is None:
            raise
        raise error from None
    finally:
        near.close_now()
        if far is not None:
            far.close_now()


async def _measure(near: Fabric, far: Fabric, pages: tuple[int, ...], seconds: float) -> PathFigures:
    async with open_path(near, far) as path:
        round_trip = await path.round_trip()
        gbs = {page: await path.bandwidth(page, seconds) for page in pages}
        fence = await path.fence()
    return PathFigures(near.info.provider, near.info.domain, round_trip, gbs, fence)


def _first(group: BaseExceptionGroup[BaseException]) -> FabricError | None:
    for error in group.exceptions:
        found = _first(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, FabricError):
            return found
    return None


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
