"""Arenas: the one region of memory that backs all KV pages of a rank, shared by worker and node.

The worker creates an arena and sends its file descriptor; the node maps it and registers it with the NICs.
Both see the same bytes:

    worker                        node
    MemfdArena.create(n)  --fd--> MemfdArena.attach(fd, n)
        | model writes KV             | the fabric reads and writes pages
        +------------- same pages ----+

`Arena` is what the rest of pdserve knows. On a CPU it is a memfd; device memory implements the same protocol
with its own exportable handle behind `fileno()`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Protocol, runtime_checkable

from pdserve.errors import WorkerError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A sealed arena keeps its size for good: a mapped page that a peer writes can never turn into a SIGBUS."""

_open: set[int] = set()


def open_arenas() -> int:
    """How many arenas of this process are not closed; zero at the end of every test."""
    return len(_open)


@runtime_checkable
class Arena(Protocol):
    """A region of `length` bytes that worker and node share.

    The creator's `fileno()` is a descriptor that another process can map; it stays owned by the arena.
    """

    @property
    def buffer(self) -> memoryview:
        """The whole region, writable, as bytes. Whoever exports it must let go before `close`."""
        ...

    @property
    def length(self) -> int: ...

    def fileno(self) -> int: ...

    def close(self) -> None:
        """Unmap and close. Idempotent. Raises BufferError, closing nothing, while `buffer` is in use."""
        ...


class MemfdArena:
    """An arena in anonymous shared memory (memfd_create(2)), mapped read-write.

    It starts zeroed, and a page of it takes memory only once it's touched, so a large arena costs nothing
    until it's used. Unmapped by `close`, never by the garbage collector.
    """

    def __init__(self, fd: int, length: int) -> None:
        """Map `fd` and own it from here on, also when this raises (WorkerError, names both sizes)."""
        try:
            _check_memfd(fd, length)
            self._map = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(fd)
            raise WorkerError(f"cannot map an arena of {length} bytes: {error}") from error
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._length = length
        self._buffer = memoryview(self._map)
        _open.add(id(self))

    @classmethod
    def create(cls, length: int, name: str, *, seal: bool = True) -> MemfdArena:
        """A new arena of `length` bytes, zeroed. `name` shows in /proc/PID/maps. Sealed against resizing.

        Raises WorkerError where the system has no room for it.
        """
        if length <= 0:
            raise WorkerError(f"an arena of {length} bytes: the length must be positive")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, length)
            if seal:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise WorkerError(f"cannot size an arena of {length} bytes: {error}") from error
        return cls(fd, length)

    @classmethod
    def attach(cls, fd: int, length: int) -> MemfdArena:
        """Map another process's arena. Takes over `fd`, also when it raises.

        Raises WorkerError where the file is shorter or longer than `length`, or not sealed.
        """
        try:
            _check_sealed(fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, length)

    @property
    def buffer(self) -> memoryview:
        return self._buffer

    @property
    def length(self) -> int:
        return self._length

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def fileno(self) -> int:
        if self.closed:
            raise ValueError("the arena is closed")
        return self._fd

    def close(self) -> None:
        if self.closed:
            return
        # A C library that registered the buffer holds an export: releasing it raises BufferError, and the
        # arena stays whole, because a NIC may still write there.
        try:
            self._buffer.release()
            self._map.close()
        except BufferError as error:
            if not self._map.closed:
                self._restore_buffer()
            raise BufferError(
                "the arena is still in use: close its fabric regions and views first"
            ) from error
        os.close(self._fd)
        self._fd = -1
        _open.discard(id(self))

    def _restore_buffer(self) -> None:
        try:
            self._buffer.nbytes  # noqa: B018  raises when the view was released
        except ValueError:
            self._buffer = memoryview(self._map)

    def __enter__(self) -> MemfdArena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _check_memfd(fd: int, length: int) -> None:
    size = os.fstat(fd).st_size
    if size != length:
        raise WorkerError(f"the arena's file has {size} bytes, expected {length}")


def _check_sealed(fd: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise WorkerError(f"the arena's descriptor is not a memfd: {error}") from error
    if seals & SEALS != SEALS:
        raise WorkerError(f"the arena is not sealed against resizing (seals {seals:#x}, expected {SEALS:#x})")
