"""Step 6: the layer watcher. It follows a worker's layer counter and tells the messenger.

The worker pokes an eventfd after each tick of a step that sends something; the counter itself is read with
acquire semantics, so whatever a tick covers (a layer's KV) is visible to the NIC once the tick is seen. Pokes
coalesce: several layers may be found done at once, never a layer twice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from pdserve.memory.counter import LayerCounter


class LayerWatcher:
    """One worker's counter and its eventfd; owns neither."""

    def __init__(self, counter: LayerCounter, tick_fd: int, on_ticks: Callable[[int], None]) -> None:
        """`on_ticks(value)` is called with the counter's value whenever it has grown."""
        self._counter = counter
        self._tick_fd = tick_fd
        self._on_ticks = on_ticks
        self._poked = asyncio.Event()
        self.seen = 0

    async def run(self) -> None:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._tick_fd, self._readable)
        try:
            while True:
                await self._poked.wait()
                self._poked.clear()
                self.look()
        finally:
            loop.remove_reader(self._tick_fd)

    def look(self) -> None:
        """Read the counter now. Also called when a step's result arrives, which may overtake its pokes."""
        value = self._counter.value
        if value > self.seen:
            self.seen = value
            self._on_ticks(value)

    def _readable(self) -> None:
        try:
            os.eventfd_read(self._tick_fd)
        except BlockingIOError:
            return
        self._poked.set()
