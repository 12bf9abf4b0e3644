"""The layer counter: how a node follows the forward pass of its worker without asking.

One page of shared memory, written by one rank, read by the node:

    offset  0    tick counter, u64: one tick a layer, one more after the final norm; never reset
           64    hold_at, u64: the test gate (a cache line of its own); NO_GATE = open
          128    unused

A tick is a release store after the layer's KV was written; the node's acquire load then sees that KV. Step
`s` of a model of L layers makes ticks s*(L+1)+1 .. (s+1)*(L+1), also when it computes nothing.
"""

from __future__ import annotations

import mmap

from pdserve.fabric.atomics import SharedCounter
from pdserve.memory.arena import MemfdArena

NO_GATE = 2**64 - 1
_COUNTER = 0
_HOLD_AT = 64


class LayerCounter:
    """A 64-bit monotone counter in shared memory with one writer, and the gate word beside it."""

    def __init__(self, page: MemfdArena) -> None:
        self._page = page
        self._ticks = SharedCounter(page.buffer, _COUNTER)
        self._hold_at = SharedCounter(page.buffer, _HOLD_AT)

    @classmethod
    def create(cls) -> LayerCounter:
        """A new counter at zero, its gate open."""
        counter = cls(MemfdArena.create(mmap.PAGESIZE, "pdserve-ticks"))
        counter.hold_at = NO_GATE
        return counter

    @classmethod
    def attach(cls, fd: int) -> LayerCounter:
        """Map another process's counter. Takes over `fd`, also when it raises WorkerError."""
        return cls(MemfdArena.attach(fd, mmap.PAGESIZE))

    def tick(self) -> int:
        """Add one (release store) and return the new value. Only the owning rank may tick."""
        value = self._ticks.load() + 1
        self._ticks.store(value)
        return value

    @property
    def value(self) -> int:
        """The ticks so far (acquire load)."""
        return self._ticks.load()

    @property
    def hold_at(self) -> int:
        """Where a worker started with `Init.gate` holds: after the tick that makes the counter this value."""
        return self._hold_at.load()

    @hold_at.setter
    def hold_at(self, value: int) -> None:
        self._hold_at.store(value)

    def fileno(self) -> int:
        return self._page.fileno()

    def close(self) -> None:
        """Unmap and close. Idempotent."""
        self._ticks.close()
        self._hold_at.close()
        self._page.close()

    def __enter__(self) -> LayerCounter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
