"""The parts without a network: immediates, counters, tables. Checked against plain Python models."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdserve.fabric._core import lib

from pdserve.fabric import NO_IMM, ImmCounters, WriteTable, pack_imm, unpack_imm

slots = st.integers(0, 4095)
runs = st.integers(1, 256)
words = st.integers(0, 2**64 - 1)


@given(slots, slots, runs)
def test_an_immediate_holds_its_fields(slot: int, generation: int, count: int) -> None:
    imm = pack_imm(slot, generation, count)
    assert 0 <= imm < 2**32
    assert unpack_imm(imm) == (slot, generation, count)
    assert imm >> 20 == slot


@given(st.integers(0, 2**32 - 1))
def test_every_word_is_an_immediate(imm: int) -> None:
    assert pack_imm(*unpack_imm(imm)) == imm


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("slot", (4096, 0, 1)),
        ("slot", (-1, 0, 1)),
        ("generation", (0, 4096, 1)),
        ("runs", (0, 0, 0)),
        ("runs", (0, 0, 257)),
    ],
)
def test_fields_out_of_range_are_named(field: str, arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=field):
        pack_imm(*arguments)


@pytest.mark.parametrize("imm", [-1, 2**32])
def test_what_is_no_word_is_refused(imm: int) -> None:
    with pytest.raises(ValueError, match="imm"):
        unpack_imm(imm)


few = st.integers(0, 3)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("arm"), few, few, st.integers(1, 20)),
        st.tuples(st.just("add"), few, few, st.integers(1, 12)),
        st.tuples(st.just("disarm"), few, st.just(0), st.just(0)),
        st.tuples(st.just("deliver"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(steps)
def test_counters_agree_with_a_model(script: list[tuple[str, int, int, int]]) -> None:
    counters = ImmCounters()
    armed: dict[int, list[int]] = {}  # slot -> [generation, expected, count, told]
    stale = 0
    told: list[tuple[str, int]] = []
    expected: list[tuple[str, int]] = []
    for action, slot, generation, count in script:
        if action == "arm" and slot not in armed:
            counters.arm(
                slot,
                generation,
                count,
                on_complete=lambda s: told.append(("complete", s)),
                on_overshoot=lambda s, _: told.append(("over", s)),
            )
            armed[slot] = [generation, count, 0, 0]
        elif action == "add":
            lib.pd_counters_add(counters._native, pack_imm(slot, generation, count), 1)
            if slot in armed and armed[slot][0] == generation:
                armed[slot][2] += count
            else:
                stale += 1
        elif action == "disarm":
            left = armed.pop(slot, None)
            assert counters.disarm(slot) == (left[2] if left else 0)
        elif action == "deliver":
            counters._deliver()
            for number, state in armed.items():
                if state[2] > state[1] and state[3] < 2:
                    state[3] = 2
                    expected.append(("over", number))
                elif state[2] == state[1] and state[3] < 1:
                    state[3] = 1
                    expected.append(("complete", number))
            assert sorted(told) == sorted(expected)
        for number in range(4):
            assert counters.count(number) == (armed[number][2] if number in armed else 0)
        assert counters.stale == stale
        assert counters.armed == len(armed)


def test_an_armed_slot_is_not_armed_again() -> None:
    counters = ImmCounters()
    counters.arm(1, 2, 3, on_complete=lambda _: None)
    with pytest.raises(ValueError, match="slot 1 is armed already, with generation 2"):
        counters.arm(1, 3, 3, on_complete=lambda _: None)
    for arguments, field in (((4096, 0, 1), "slot"), ((0, -1, 1), "generation"), ((0, 0, 0), "runs")):
        with pytest.raises(ValueError, match=field):
            counters.arm(*arguments, on_complete=lambda _: None)


def test_a_count_never_wraps() -> None:
    counters = ImmCounters()
    counters.arm(0, 0, 2**32 - 2, on_complete=lambda _: None)
    for _ in range(3):
        lib.pd_counters_add(counters._native, pack_imm(0, 0, 256), 1)
    assert counters.count(0) == 768


def test_all_slots_changed_at_once_are_all_delivered() -> None:
    counters = ImmCounters()
    complete: list[int] = []
    for slot in range(4096):
        counters.arm(slot, slot, 1, on_complete=complete.append)
        lib.pd_counters_add(counters._native, pack_imm(slot, slot, 1), 1)
    assert counters._deliver() == 4096
    assert complete == list(range(4096))
    assert counters._deliver() == 0


def test_a_callback_may_disarm_and_arm_again() -> None:
    counters = ImmCounters()
    seen: list[int] = []

    def again(slot: int) -> None:
        seen.append(counters.disarm(slot))
        counters.arm(slot, 1, 5, on_complete=seen.append)

    counters.arm(0, 0, 2, on_complete=again)
    lib.pd_counters_add(counters._native, pack_imm(0, 0, 2), 1)
    counters._deliver()
    assert (seen, counters.count(0)) == ([2], 0)


rows = st.lists(
    st.tuples(
        st.integers(0, 2**40),
        st.integers(0, 2**40),
        st.integers(1, 2**30),
        st.integers(0, 2**32 - 1) | st.just(NO_IMM),
    ),
    max_size=50,
)


@given(rows)
def test_a_table_knows_its_extent(table: list[tuple[int, int, int, int]]) -> None:
    made = WriteTable.of(table)
    assert len(made) == len(table)
    assert made.bytes == sum(row[2] for row in table)
    assert made.runs == sum((row[3] & 0xFF) + 1 for row in table if row[3] != NO_IMM)
    assert made.max_length == max((row[2] for row in table), default=0)
    assert made.src_end == max((row[0] + row[2] for row in table), default=0)
    assert made.dst_end == max((row[1] + row[2] for row in table), default=0)


@given(st.lists(st.tuples(words, words, words, words), min_size=1, max_size=6))
def test_a_bad_row_is_named_and_nothing_overflows(table: list[tuple[int, int, int, int]]) -> None:
    def is_bad(row: tuple[int, int, int, int]) -> bool:
        src, dst, length, imm = row
        return (
            not length or src + length >= 2**64 or dst + length >= 2**64 or (imm != NO_IMM and imm >= 2**32)
        )

    bad = [number for number, row in enumerate(table) if is_bad(row)]
    total, over = 0, None
    for number, row in enumerate(table):
        total += row[2]
        if total >= 2**64:
            over = number
            break
    first = min([*bad, *([over] if over is not None else [])], default=None)
    if first is None:
        assert WriteTable.of(table).bytes == total
    else:
        with pytest.raises(ValueError, match=f"row {first} "):
            WriteTable.of(table)


def test_every_kind_of_buffer_gives_the_same_table() -> None:
    flat = [0, 10, 20, 1, 30, 40, 50, NO_IMM]
    square = np.array(flat, np.uint64).reshape(2, 4)
    sources: tuple[Any, ...] = (array("Q", flat), square, square.reshape(8), memoryview(array("Q", flat)))
    for source in sources:
        table = WriteTable(source)
        assert (len(table), table.bytes, table.runs, table.src_end, table.dst_end) == (2, 70, 2, 80, 90)


def test_a_table_is_a_copy() -> None:
    source = array("Q", [0, 0, 8, 0])
    table = WriteTable(source)
    source[2] = 2**60
    assert table._native[0].length == 8


@pytest.mark.parametrize(
    ("match", "source"),
    [
        ("64-bit", array("I", [1, 2, 3, 4])),
        ("64-bit", array("q", [1, 2, 3, 4])),
        ("64-bit", b"x" * 32),
        ("table", array("Q", [1, 2, 3])),
        ("table", np.zeros((4, 2), np.uint64)),
        ("contiguous", np.zeros((8, 8), np.uint64)[:, ::2]),
    ],
)
def test_what_is_no_table_is_refused(match: str, source: array[int]) -> None:
    with pytest.raises(ValueError, match=match):
        WriteTable(source)


def test_a_value_outside_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        WriteTable.of([(0, 0, 2**64, 0)])
    with pytest.raises(ValueError, match="outside"):
        WriteTable.of([(-1, 0, 1, 0)])


def test_no_rows_are_a_table() -> None:
    assert len(WriteTable(array("Q"))) == 0
    nothing: Any = np.zeros((0, 4), np.uint64)
    assert len(WriteTable(nothing)) == 0
