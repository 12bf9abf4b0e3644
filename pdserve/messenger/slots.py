"""The imm slots of a decode process, and which generation of each may count.

    FREE --take--> ARMED --retire--> FREE (next generation, at the end of the queue)
                     '---quarantine--> QUARANTINED --retire--'

First in, first out, so that a slot rests as long as possible before its next generation; with 4,096 slots and
4,096 generations a stale immediate would have to be 16 million uses late to be taken for a new one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from pdserve.messenger.imm import GENERATIONS, SLOTS, base


class SlotState(Enum):
    FREE = "free"
    """Nobody may write to it."""
    ARMED = "armed"
    """A peer has been told of it and is expected to write."""
    QUARANTINED = "quarantined"
    """Its request has ended, but a peer may still write to it."""


@dataclass(frozen=True, slots=True)
class Slot:
    index: int
    generation: int

    @property
    def imm_base(self) -> int:
        return base(self.index, self.generation)


class SlotPool:
    """Owns all slots of a process. Misuse raises ValueError: it is a bug of the caller's."""

    def __init__(self, size: int = SLOTS) -> None:
        if not 1 <= size <= SLOTS:
            raise ValueError(f"{size} slots are not in 1..{SLOTS}")
        self._generation = [0] * size
        self._state = [SlotState.FREE] * size
        self._queue = deque(range(size))

    @property
    def free(self) -> int:
        return len(self._queue)

    def take(self, count: int) -> list[Slot]:
        """Arm `count` slots. Raises ValueError if fewer are free (see `free`)."""
        if count > len(self._queue):
            raise ValueError(f"{count} slots wanted, {len(self._queue)} free")
        taken = [self._queue.popleft() for _ in range(count)]
        for index in taken:
            self._state[index] = SlotState.ARMED
        return [Slot(index, self._generation[index]) for index in taken]

    def quarantine(self, slot: Slot) -> None:
        """Its request has ended while a peer may still write. Harmless if it is in quarantine already."""
        self._check_held(slot)
        self._state[slot.index] = SlotState.QUARANTINED

    def retire(self, slot: Slot) -> None:
        """Nobody can write to this generation any more, or nobody's write to it counts."""
        self._check_held(slot)
        self._state[slot.index] = SlotState.FREE
        self._generation[slot.index] = (slot.generation + 1) % GENERATIONS
        self._queue.append(slot.index)

    def current(self, index: int, generation: int) -> bool:
        """Whether this generation of a slot is held."""
        return (
            0 <= index < len(self._state)
            and self._state[index] is not SlotState.FREE
            and self._generation[index] == generation
        )

    def _check_held(self, slot: Slot) -> None:
        if not self.current(slot.index, slot.generation):
            raise ValueError(f"{slot} is not held")

    def statistics(self) -> dict[str, int]:
        return {state.value: self._state.count(state) for state in SlotState}

    def check(self) -> None:
        """Raises AssertionError unless the free queue and the states agree."""
        assert len(set(self._queue)) == len(self._queue), "a slot is free twice"
        free = {index for index, state in enumerate(self._state) if state is SlotState.FREE}
        assert set(self._queue) == free, "the free queue and the states differ"
