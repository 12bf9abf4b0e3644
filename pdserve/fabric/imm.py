"""The 32-bit immediate of a write: slot:12 | generation:12 | runs-1:8, slot highest. And the receiver's
counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pdserve.fabric._core import ffi, lib

SLOTS = 1 << 12
GENERATIONS = 1 << 12
MAX_RUNS = 1 << 8
MAX_EXPECTED = 2**32 - 2
NO_IMM = 2**64 - 1
"""In a WriteTable's fourth column: a write without an immediate."""

_COLLECT = 256


class Imm(NamedTuple):
    slot: int
    generation: int
    runs: int


def pack_imm(slot: int, generation: int, runs: int) -> int:
    """The immediate of a write that stands for `runs` (1..256) runs of `slot` (0..4095)."""
    if not 0 <= slot < SLOTS:
        raise ValueError(f"slot {slot} is outside 0..{SLOTS - 1}")
    if not 0 <= generation < GENERATIONS:
        raise ValueError(f"generation {generation} is outside 0..{GENERATIONS - 1}")
    if not 1 <= runs <= MAX_RUNS:
        raise ValueError(f"runs {runs} is outside 1..{MAX_RUNS}")
    return slot << 20 | generation << 8 | runs - 1


def unpack_imm(imm: int) -> Imm:
    """The fields of an immediate (0..2**32-1)."""
    if not 0 <= imm < 2**32:
        raise ValueError(f"imm {imm} is outside 0..{2**32 - 1}")
    return Imm(imm >> 20, imm >> 8 & 0xFFF, (imm & 0xFF) + 1)


class _Armed:
    __slots__ = ("complete", "expected", "generation", "on_complete", "on_overshoot", "overshot")

    def __init__(
        self,
        generation: int,
        expected: int,
        on_complete: Callable[[int], None],
        on_overshoot: Callable[[int, int], None] | None,
    ) -> None:
        self.generation = generation
        self.expected = expected
        self.on_complete = on_complete
        self.on_overshoot = on_overshoot
        self.complete = False
        self.overshot = False


class ImmCounters:
    """Counts runs by slot over every port it is given to; native code sums, Python hears of what matters.

    A slot is armed for one generation. An immediate of an unarmed slot or of another generation is *stale*:
    counted as such, otherwise ignored. Callbacks run in `Fabric.run()`, on the event loop; an exception out
    of one ends `run()`. When `on_complete` is called, the data of all the slot's runs is in memory.

    Owns about 80 KiB of native memory, freed with the object. For one event loop's thread.
    """

    def __init__(self) -> None:
        native = lib.pd_counters_new()
        if native == ffi.NULL:
            raise MemoryError("no memory for immediate counters")
        self._native = ffi.gc(native, lib.pd_counters_free)
        self._batch = ffi.new("pd_count[]", _COLLECT)
        self._one = ffi.new("pd_count *")
        self._armed: dict[int, _Armed] = {}
        self._on_progress: Callable[[int, int], None] | None = None

    def arm(
        self,
        slot: int,
        generation: int,
        runs: int,
        *,
        on_complete: Callable[[int], None],
        on_overshoot: Callable[[int, int], None] | None = None,
    ) -> None:
        """Expect `runs` (>= 1) runs in `slot`. Arm before the peer may learn of the slot: what comes earlier
        is stale and lost to the count.

        `on_complete(slot)`: exactly the expected count is there. `on_overshoot(slot, count)`: more than that
        (once; without `on_complete` if one turn brought both). The slot stays armed until `disarm`.
        """
        if not 0 <= slot < SLOTS:
            raise ValueError(f"slot {slot} is outside 0..{SLOTS - 1}")
        if not 0 <= generation < GENERATIONS:
            raise ValueError(f"generation {generation} is outside 0..{GENERATIONS - 1}")
        if not 1 <= runs <= MAX_EXPECTED:
            raise ValueError(f"runs {runs} is outside 1..{MAX_EXPECTED}")
        if slot in self._armed:
            raise ValueError(f"slot {slot} is armed already, with generation {self._armed[slot].generation}")
        self._armed[slot] = _Armed(generation, runs, on_complete, on_overshoot)
        lib.pd_counters_arm(self._native, slot, generation, runs)

    def count(self, slot: int) -> int:
        """Runs counted so far in an armed slot; 0 where it isn't armed."""
        return int(self._read(slot).count) if slot in self._armed else 0

    def counted_ns(self, slot: int) -> int:
        """CLOCK_MONOTONIC of the last run counted in an armed slot; 0 for none."""
        return int(self._read(slot).ns) if slot in self._armed else 0

    def disarm(self, slot: int) -> int:
        """Stop counting; returns the final count. No callback of this arming comes after. 0 if it wasn't
        armed."""
        if self._armed.pop(slot, None) is None:
            return 0
        return int(lib.pd_counters_disarm(self._native, slot))

    @property
    def armed(self) -> int:
        """How many slots are armed."""
        return len(self._armed)

    @property
    def stale(self) -> int:
        """Immediates of unarmed slots or other generations, since the start."""
        return int(lib.pd_counters_stale(self._native))

    @property
    def on_progress(self) -> Callable[[int, int], None] | None:
        """Called as (slot, count) when a count has moved, at most once a slot and turn of the pump. None (the
        default) costs nothing."""
        return self._on_progress

    @on_progress.setter
    def on_progress(self, callback: Callable[[int, int], None] | None) -> None:
        self._on_progress = callback
        lib.pd_counters_want_progress(self._native, int(callback is not None))

    def statistics(self) -> dict[str, int]:
        return {"armed": self.armed, "stale": self.stale}

    def _read(self, slot: int) -> _CountRecord:
        lib.pd_counters_read(self._native, slot, self._one)
        record: _CountRecord = self._one
        return record

    def _deliver(self) -> int:
        """Run the callbacks of what has changed. Called by the pump. Returns how many slots had changed."""
        total = 0
        while True:
            found = int(lib.pd_counters_collect(self._native, self._batch, _COLLECT))
            # Out of native memory first: a callback may come back here.
            changes = [(c.slot, c.generation, c.count) for c in self._batch[0:found]]
            for slot, generation, count in changes:
                self._tell(slot, generation, count)
            total += found
            if found < _COLLECT:
                return total

    def _tell(self, slot: int, generation: int, count: int) -> None:
        armed = self._armed.get(slot)
        if armed is None or armed.generation != generation:
            return  # disarmed, or armed anew, since native code marked it
        if self._on_progress is not None:
            self._on_progress(slot, count)
            if self._armed.get(slot) is not armed:
                return
        if count > armed.expected and not armed.overshot:
            armed.overshot = armed.complete = True
            if armed.on_overshoot is not None:
                armed.on_overshoot(slot, count)
        elif count == armed.expected and not armed.complete:
            armed.complete = True
            armed.on_complete(slot)


class _CountRecord:
    """The shape of a native pd_count, for the type checker."""

    slot: int
    generation: int
    count: int
    ns: int
