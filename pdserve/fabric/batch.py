"""A batch of writes under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from pdserve.errors import FabricError

if TYPE_CHECKING:
    from pdserve.fabric.region import MemoryRegion
    from pdserve.fabric.table import WriteTable

DoneCallback = Callable[[FabricError | None], object]


class WriteBatch:
    """All writes of one `write` or `write_pages`. Ends once: when each of them has completed locally, or,
    after an error, when those posted have come back and the rest has been dropped.

    Until it is done the source memory must not change: the NIC may read it. Local completion means that the
    source is free again, not that the data has arrived (the receiver's immediates say that). `await batch`
    returns None or raises FabricError; cancelling the await leaves the writes alone.
    """

    __slots__ = (
        "_callbacks",
        "_loop",
        "_region",
        "_table",
        "bytes",
        "done",
        "done_ns",
        "error",
        "posted_ns",
        "writes",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, region: MemoryRegion, table: WriteTable) -> None:
        self._loop = loop
        self._region: MemoryRegion | None = region
        self._table: WriteTable | None = table  # the native thread reads it
        self._callbacks: list[DoneCallback] = []
        self.done = False
        self.error: FabricError | None = None
        self.writes = len(table)
        self.bytes = table.bytes
        self.posted_ns = 0
        """CLOCK_MONOTONIC of the first write's post; 0 before the end, or if nothing was posted."""
        self.done_ns = 0
        """CLOCK_MONOTONIC of the end."""
        region.batches += 1

    def add_done_callback(self, callback: DoneCallback) -> None:
        """Call `callback(error or None)` at the end, in `Fabric.run()`; soon, if that was before."""
        if self.done:
            self._loop.call_soon(callback, self.error)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[object, None, None]:
        if not self.done:
            waiter: asyncio.Future[None] = self._loop.create_future()

            def wake(_: FabricError | None) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            self._callbacks.append(wake)
            yield from waiter.__await__()
        if self.error is not None:
            raise self.error

    def _end(self, error: FabricError | None, posted_ns: int, done_ns: int) -> list[DoneCallback]:
        """Mark the end; the caller runs the callbacks it gets."""
        self.done = True
        self.error = error
        self.posted_ns = posted_ns
        self.done_ns = done_ns
        if self._region is not None:
            self._region.batches -= 1
        self._region = self._table = None
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def __repr__(self) -> str:
        state = "in flight" if not self.done else "failed" if self.error else "done"
        return f"WriteBatch({self.writes} writes, {self.bytes} bytes, {state})"
