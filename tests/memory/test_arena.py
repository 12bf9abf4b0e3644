"""An arena: shared, zeroed, sealed, lazily backed, and closed only when nobody uses it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.errors import WorkerError
from pdserve.memory.arena import SEALS, Arena, MemfdArena, open_arenas


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_both_sides_see_the_same_zeroed_bytes() -> None:
    with (
        MemfdArena.create(3 * mmap.PAGESIZE + 8, "test") as ours,
        MemfdArena.attach(os.dup(ours.fileno()), ours.length) as theirs,
    ):
        assert isinstance(theirs, Arena)
        assert bytes(theirs.buffer) == bytes(ours.length)
        ours.buffer[-4:] = b"last"
        theirs.buffer[:5] = b"first"
        assert bytes(theirs.buffer[-4:]) == b"last"
        assert bytes(ours.buffer[:5]) == b"first"


def test_a_huge_arena_costs_nothing_until_it_is_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with MemfdArena.create(1 << 40, "test") as arena:
        arena.buffer[(1 << 40) - 1] = 7
        assert arena.buffer[(1 << 40) - 1] == 7
        assert os.fstat(arena.fileno()).st_blocks * 512 <= 1 << 22
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 14  # KiB


@pytest.mark.parametrize("resize", [0, 100, 1 << 20])
def test_a_sealed_arena_keeps_its_size(resize: int) -> None:
    with MemfdArena.create(1 << 16, "test") as arena:
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fileno(), resize)
        with pytest.raises(PermissionError):
            fcntl.fcntl(arena.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_the_descriptor_is_not_inherited_and_the_name_shows() -> None:
    with MemfdArena.create(1 << 16, "pdserve-name") as arena:
        assert not os.get_inheritable(arena.fileno())
        assert "pdserve-name" in os.readlink(f"/proc/self/fd/{arena.fileno()}")


def unsealed() -> int:
    with MemfdArena.create(1 << 16, "test", seal=False) as arena:
        return os.dup(arena.fileno())


def sealed() -> int:
    with MemfdArena.create(1 << 16, "test") as arena:
        return os.dup(arena.fileno())


def pipe_end() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


@pytest.mark.parametrize(
    ("make", "length", "says"),
    [
        (sealed, 1 << 17, "has 65536 bytes, expected 131072"),
        (sealed, 1 << 15, "has 65536 bytes, expected 32768"),
        (unsealed, 1 << 16, "not sealed"),
        (pipe_end, 1 << 16, "not a memfd"),
    ],
)
def test_attach_refuses_what_is_not_the_arena(make: Callable[[], int], length: int, says: str) -> None:
    files, arenas = open_files(), open_arenas()
    with pytest.raises(WorkerError, match=says):
        MemfdArena.attach(make(), length)
    assert (open_files(), open_arenas()) == (files, arenas)


def test_attach_refuses_an_ordinary_file(tmp_path: Path) -> None:
    files = open_files()
    (tmp_path / "file").write_bytes(bytes(1 << 16))
    with pytest.raises(WorkerError, match=r"not a memfd|not sealed"):
        MemfdArena.attach(os.open(tmp_path / "file", os.O_RDWR), 1 << 16)
    assert open_files() == files


@pytest.mark.parametrize("length", [0, -1, 1 << 63])
def test_create_refuses_a_length_that_cannot_be(length: int) -> None:
    files = open_files()
    with pytest.raises(WorkerError, match=str(length)):
        MemfdArena.create(length, "test")
    assert open_files() == files


USERS: dict[str, Callable[[memoryview], object]] = {
    "slice": lambda buffer: buffer[8:16],
    "ctypes": lambda buffer: (ctypes.c_char * 8).from_buffer(buffer),
    "cast": lambda buffer: buffer.cast("Q"),
}


@pytest.mark.parametrize("kind", USERS)
def test_close_waits_for_those_who_use_the_buffer(kind: str) -> None:
    arenas = open_arenas()
    arena = MemfdArena.create(1 << 16, "test")
    users = [USERS[kind](arena.buffer)]
    with pytest.raises(BufferError, match="still in use"):
        arena.close()
    assert open_arenas() == arenas + 1
    arena.buffer[0] = 1
    assert os.fstat(arena.fileno()).st_size == 1 << 16
    users.clear()
    arena.close()
    arena.close()
    assert open_arenas() == arenas
    with pytest.raises(ValueError, match="closed"):
        arena.fileno()


def test_everything_is_given_back() -> None:
    files, arenas = open_files(), open_arenas()
    with MemfdArena.create(1 << 16, "test"):
        assert open_arenas() == arenas + 1
    assert (open_files(), open_arenas()) == (files, arenas)


def test_what_is_sealed() -> None:
    with MemfdArena.create(1 << 16, "test") as arena:
        assert fcntl.fcntl(arena.fileno(), fcntl.F_GET_SEALS) == SEALS
