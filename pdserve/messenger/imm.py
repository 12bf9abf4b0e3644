"""The 32-bit immediate of a write: which slot it counts for, and how many runs it stands for.

bit 31        20 19         8 7        0
   |   slot    | generation | runs - 1 |
"""

from __future__ import annotations

from typing import NamedTuple

SLOTS = 1 << 12
GENERATIONS = 1 << 12
MAX_RUNS = 1 << 8


class Imm(NamedTuple):
    slot: int
    generation: int
    runs: int


def pack(slot: int, generation: int, runs: int) -> int:
    """The immediate of a write of `runs` (1..256) runs. Raises ValueError out of range."""
    if not 1 <= runs <= MAX_RUNS:
        raise ValueError(f"{runs} runs are not in 1..{MAX_RUNS}")
    return base(slot, generation) | (runs - 1)


def base(slot: int, generation: int) -> int:
    """The immediate with its runs field zero: how messages name a slot. Raises ValueError out of range."""
    if not (0 <= slot < SLOTS and 0 <= generation < GENERATIONS):
        raise ValueError(f"slot {slot} generation {generation} does not fit 12 bits each")
    return slot << 20 | generation << 8


def unpack(imm: int) -> Imm:
    """The parts of an immediate."""
    return Imm(imm >> 20 & 0xFFF, imm >> 8 & 0xFFF, (imm & 0xFF) + 1)


def is_base(value: int) -> bool:
    """Whether a value of a message can be an imm base."""
    return 0 <= value < 1 << 32 and not value & 0xFF
