"""64-bit words in memory shared between processes, with release stores and acquire loads.

What a writer stored before a release store is visible to a reader that has seen the value with an acquire
load (C11, 7.17.3). Python's own reads and writes of a shared mapping promise no such thing. Nothing here
loads libfabric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.fabric._core import ffi, lib

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

WORD = 8
_MAX = 2**64 - 1


def _word(buffer: ReadableBuffer, offset: int, *, writable: bool) -> tuple[Any, Any]:
    """The pinned buffer and the address of its word at byte `offset`."""
    view = ffi.from_buffer("char[]", buffer, require_writable=writable)
    if not 0 <= offset <= len(view) - WORD:
        limit = len(view) - WORD
        ffi.release(view)
        raise ValueError(f"offset {offset} is outside 0..{limit}, where a 64-bit word fits the buffer")
    address = view + offset
    if int(ffi.cast("uintptr_t", address)) % WORD:
        ffi.release(view)
        raise ValueError(f"offset {offset} puts the word at an address that is not a multiple of {WORD}")
    return view, address


def store_release(buffer: WriteableBuffer, offset: int, value: int) -> None:
    """Store `value` (0..2**64-1) as the native-endian word at byte `offset` of `buffer`, with release
    order."""
    if not 0 <= value <= _MAX:
        raise ValueError(f"value {value} is outside 0..{_MAX}")
    view, address = _word(buffer, offset, writable=True)
    lib.pd_store_release(address, value)
    ffi.release(view)


def load_acquire(buffer: ReadableBuffer, offset: int) -> int:
    """The word at byte `offset` of `buffer`, loaded with acquire order."""
    view, address = _word(buffer, offset, writable=False)
    value = int(lib.pd_load_acquire(address))
    ffi.release(view)
    return value


class SharedCounter:
    """One such word, with the buffer pinned once: for words that are touched often.

    Borrows `buffer`: a mapping cannot be closed before `close()` has given it back. Use from one thread at a
    time within a process; any number of processes may load, one may store.
    """

    def __init__(self, buffer: ReadableBuffer, offset: int = 0, *, writable: bool = True) -> None:
        self._writable = writable
        self._view, self._address = _word(buffer, offset, writable=writable)

    def store(self, value: int) -> None:
        """Release store. `value` is 0..2**64-1."""
        if not self._writable:
            raise ValueError("this counter was opened for reading only")
        if not 0 <= value <= _MAX:
            raise ValueError(f"value {value} is outside 0..{_MAX}")
        lib.pd_store_release(self._checked(), value)

    def load(self) -> int:
        """Acquire load."""
        return int(lib.pd_load_acquire(self._checked()))

    def close(self) -> None:
        """Give the buffer back. Safe to call twice."""
        if self._address is not None:
            self._address = None
            ffi.release(self._view)

    def __enter__(self) -> SharedCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self) -> Any:
        if self._address is None:
            raise ValueError("the counter is closed")
        return self._address
