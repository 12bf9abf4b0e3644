"""The layer counter: one writer, any number of readers, a gate beside it."""

from __future__ import annotations

import os
import struct

import pytest

from pdserve.errors import WorkerError
from pdserve.memory.arena import MemfdArena, open_arenas
from pdserve.memory.counter import NO_GATE, LayerCounter


def test_ticks_are_seen_through_another_mapping() -> None:
    with LayerCounter.create() as ours, LayerCounter.attach(os.dup(ours.fileno())) as theirs:
        assert (theirs.value, theirs.hold_at) == (0, NO_GATE)
        assert [ours.tick() for _ in range(3)] == [1, 2, 3]
        assert theirs.value == 3
        theirs.hold_at = 5
        assert (ours.hold_at, ours.value) == (5, 3)


def test_the_layout_is_the_documented_one() -> None:
    with LayerCounter.create() as counter:
        for _ in range(2):
            counter.tick()
        counter.hold_at = 1 << 63
        page = os.pread(counter.fileno(), 128, 0)
        assert struct.unpack_from("<Q", page, 0) == (2,)
        assert struct.unpack_from("<Q", page, 64) == (1 << 63,)


def test_a_page_of_the_wrong_size_is_refused() -> None:
    arenas = open_arenas()
    with MemfdArena.create(1 << 16, "test") as arena, pytest.raises(WorkerError, match="65536"):
        LayerCounter.attach(os.dup(arena.fileno()))
    assert open_arenas() == arenas


def test_close_gives_everything_back_and_may_be_repeated() -> None:
    files, arenas = len(os.listdir("/proc/self/fd")), open_arenas()
    counter = LayerCounter.create()
    counter.close()
    counter.close()
    assert (len(os.listdir("/proc/self/fd")), open_arenas()) == (files, arenas)
    with pytest.raises(ValueError, match="closed"):
        counter.tick()
