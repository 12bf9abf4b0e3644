"""Immediates and the slots they count for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdserve.messenger.imm import GENERATIONS, MAX_RUNS, SLOTS, base, is_base, pack, unpack
from pdserve.messenger.slots import Slot, SlotPool

slots = st.integers(0, SLOTS - 1)
generations = st.integers(0, GENERATIONS - 1)


@given(slots, generations, st.integers(1, MAX_RUNS))
def test_imm_round_trip(slot: int, generation: int, runs: int) -> None:
    imm = pack(slot, generation, runs)
    assert 0 <= imm < 1 << 32
    assert unpack(imm) == (slot, generation, runs)
    assert imm - (runs - 1) == base(slot, generation)
    assert is_base(imm) == (runs == 1)


@pytest.mark.parametrize("bad", [(-1, 0, 1), (SLOTS, 0, 1), (0, GENERATIONS, 1), (0, 0, 0), (0, 0, 257)])
def test_imm_refuses_what_does_not_fit(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError):
        pack(*bad)


class SlotLife(RuleBasedStateMachine):
    """No two holders share a slot, generations only rise, and the queue is first in, first out."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(5)
        self.held: list[Slot] = []
        self.retired: list[Slot] = []
        self.last_generation: dict[int, int] = {}

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        if count > self.pool.free:
            with pytest.raises(ValueError):
                self.pool.take(count)
            return
        for slot in self.pool.take(count):
            assert slot.index not in {other.index for other in self.held}
            assert slot.generation > self.last_generation.get(slot.index, -1)
            self.last_generation[slot.index] = slot.generation
            self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), quarantine=st.booleans())
    def retire(self, data: st.DataObject, quarantine: bool) -> None:
        slot = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if quarantine:
            self.pool.quarantine(slot)
            assert self.pool.statistics()["quarantined"] == 1
        self.pool.retire(slot)
        self.retired.append(slot)

    @precondition(lambda self: self.retired)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.retired))
        assert not self.pool.current(slot.index, slot.generation)
        with pytest.raises(ValueError):
            self.pool.retire(slot)

    @invariant()
    def counts(self) -> None:
        self.pool.check()
        assert self.pool.free == 5 - len(self.held)


TestSlotLife = SlotLife.TestCase
TestSlotLife.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_slots_rest_as_long_as_possible() -> None:
    pool = SlotPool(3)
    order = []
    for _ in range(6):
        (slot,) = pool.take(1)
        order.append(slot.index)
        pool.retire(slot)
    assert order == [0, 1, 2, 0, 1, 2]


def test_generations_wrap() -> None:
    pool = SlotPool(1)
    seen = []
    for _ in range(GENERATIONS + 1):
        (slot,) = pool.take(1)
        seen.append(slot.generation)
        pool.retire(slot)
    assert seen == [*range(GENERATIONS), 0]
