"""Registered memory: ours, and what we know of the peer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve.errors import FabricError
from pdserve.fabric._core import lib
from pdserve.fabric.convert import fabric_error

if TYPE_CHECKING:
    from pdserve.fabric.port import Port

_WORD_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A peer's region as it told us: what may be written, and where.

    key: the peer's `MemoryRegion.key`. base: its `.base`, the address of byte 0 (0 where the provider counts
    in offsets). length: bytes. ValueError when a field can't be one.
    """

    key: int
    base: int
    length: int

    def __post_init__(self) -> None:
        for field in ("key", "base", "length"):
            value = getattr(self, field)
            if not 0 <= value <= _WORD_MAX:
                raise ValueError(f"remote.{field}: {value} is outside 0..{_WORD_MAX}")
        if self.base + self.length > _WORD_MAX:
            raise ValueError(f"remote.length: base {self.base} + length {self.length} is beyond {_WORD_MAX}")


class MemoryRegion:
    """A buffer registered with one port: the source of its writes, or the target of its peer's.

    `key`: 62 random bits where the application picks keys. `base`: what the peer must use as the address of
    byte 0. `length`: bytes. Made by `Port.register`; the buffer stays pinned until the *port* is closed,
    because closing a region stops new writes but not one that is landing.
    """

    def __init__(self, port: Port, native: Any, length: int) -> None:
        self._port = port
        self._native = native
        self.length = length
        self.key = int(lib.pd_region_key(native))
        self.base = int(lib.pd_region_base(native))
        self.batches = 0
        """Batches of ours that read from here and have not ended."""

    @property
    def closed(self) -> bool:
        return self._native is None

    @property
    def remote(self) -> RemoteRegion:
        """What to tell the peer."""
        return RemoteRegion(self.key, self.base, self.length)

    def close(self) -> None:
        """Unregister. New writes of the peer fail from here on, and fail its link with them.

        No fence: a message being received goes on landing; only `Port.close()` ends that. FabricError
        (FI_EBUSY) while batches read from it. Safe to call twice; the port's close does it as well.
        """
        if self._native is None:
            return
        if self.batches:
            raise FabricError(
                f"{self._port!r}: a region of {self.length} bytes has {self.batches} batches in flight",
                name="FI_EBUSY",
            )
        code = lib.pd_region_close(self._native)
        if code:
            raise fabric_error(f"{self._port!r}: closing a region of {self.length} bytes", code)
        self._native = None

    def _forget(self) -> None:
        """The port has closed, and this with it."""
        self._native = None

    def __enter__(self) -> MemoryRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def statistics(self) -> dict[str, int]:
        return {"length": self.length, "batches": self.batches}

    def __repr__(self) -> str:
        return f"MemoryRegion({self.length} bytes{', closed' if self.closed else ''})"
