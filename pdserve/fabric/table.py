"""Tables of runs, prepared once and posted many times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdserve.fabric._core import ffi, lib

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

COLUMNS = 4
_ROW_BYTES = 8 * COLUMNS
_REASONS = {
    -1: "length is 0",
    -2: "src_offset + length is beyond 2**64-1",
    -3: "dst_offset + length is beyond 2**64-1",
    -4: "imm is neither 0..2**32-1 nor NO_IMM",
    -5: "the sum of all lengths is beyond 2**64-1",
}


class WriteTable:
    """N writes as native records: (src_offset, dst_offset, length, imm), offsets and lengths in bytes.

    rows: an `array('Q')` of 4N values, a numpy uint64 array [N, 4] (C order), or any contiguous buffer of
    unsigned 64-bit integers whose size is a multiple of 32 bytes. `imm` is 32 bits, or NO_IMM. The rows are
    copied: what happens to the source afterwards doesn't matter. Immutable; may be posted any number of
    times, with different shifts, at once. ValueError names the first bad row.

    extent: `bytes` in all, `runs` that the immediates stand for, `max_length`, `src_end` and `dst_end` (one
    past the last byte touched, before shifts): with them each post is bounds-checked in constant time.
    """

    __slots__ = ("_native", "bytes", "count", "dst_end", "max_length", "runs", "src_end")

    def __init__(self, rows: ReadableBuffer) -> None:
        view = memoryview(rows)
        if view.itemsize != 8 or view.format not in ("Q", "L", "=Q", "<Q", "@Q", "=L", "<L"):
            raise ValueError(f"rows: items are {view.format!r}, expected unsigned 64-bit integers")
        if not view.c_contiguous:
            raise ValueError("rows: the buffer is not contiguous in C order")
        if view.nbytes % _ROW_BYTES or (view.ndim == 2 and view.shape and view.shape[1] != COLUMNS):
            raise ValueError(f"rows: {view.nbytes} bytes of shape {view.shape} are no [N, {COLUMNS}] table")
        self.count = view.nbytes // _ROW_BYTES
        self._native = ffi.new("pd_row[]", self.count)
        ffi.memmove(self._native, view.cast("B") if self.count else b"", view.nbytes)
        extent, bad_row = ffi.new("pd_extent *"), ffi.new("size_t *")
        problem = lib.pd_table_scan(self._native, self.count, extent, bad_row)
        if problem:
            row = self._native[bad_row[0]]
            raise ValueError(
                f"rows: row {bad_row[0]} (src_offset {row.src}, dst_offset {row.dst}, length {row.length}, "
                f"imm {row.imm}): {_REASONS[problem]}"
            )
        self.bytes = int(extent.bytes)
        self.runs = int(extent.runs)
        self.max_length = int(extent.max_length)
        self.src_end = int(extent.src_end)
        self.dst_end = int(extent.dst_end)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int]]) -> WriteTable:
        """From an iterable of rows; for a few writes, not for hot paths."""
        from array import array

        flat: array[int] = array("Q")
        try:
            for row in rows:
                flat.extend(row)
        except OverflowError:
            raise ValueError(f"rows: row {row} has a value outside 0..2**64-1") from None
        return cls(flat)

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"WriteTable({self.count} writes, {self.bytes} bytes, {self.runs} runs)"
