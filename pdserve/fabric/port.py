"""Ports: one peer's two-way connection, and the unit of a fence."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdserve.errors import FabricError
from pdserve.fabric._core import ffi, lib
from pdserve.fabric.batch import DoneCallback, WriteBatch
from pdserve.fabric.convert import FI_ECANCELED, code_name, fabric_error
from pdserve.fabric.imm import NO_IMM, ImmCounters
from pdserve.fabric.region import MemoryRegion, RemoteRegion
from pdserve.fabric.table import WriteTable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

    from pdserve.fabric.fabric import Fabric

KEY_BITS = 62
_SOCKADDR_FORMATS = {1, 2, 3}  # FI_SOCKADDR, FI_SOCKADDR_IN, FI_SOCKADDR_IN6 of rdma/fabric.h
_SENT, _WRITTEN, _RECEIVED, _LOST, _CLOSED = (
    lib.PD_SENT,
    lib.PD_WRITTEN,
    lib.PD_RECEIVED,
    lib.PD_LOST,
    lib.PD_CLOSED,
)


class Port:
    """Sends to and receives from one peer. Made by `Fabric.open_port`; belongs to its event loop's thread.

    On `tcp` a port is a libfabric domain of its own with address vector, completion queue and endpoint, so
    that closing it can't disturb another peer. Operations queue in native code, messages ahead of writes,
    each kind in the order of posting; nothing is promised about the order of arrival of writes.

    Callbacks run in `Fabric.run()`. `on_message(bytes)`: a message, in a copy of its own. `on_lost(error)`:
    once, when the peer can't be reached or what it has received is unknown; queued operations end with the
    same error. The port must still be closed.
    """

    def __init__(
        self,
        fabric: Fabric,
        native: Any,
        number: int,
        name: str,
        counters: ImmCounters,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[FabricError], None],
    ) -> None:
        self._fabric = fabric
        self._native = native
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.name = name or f"port {number}"
        self.counters = counters
        self._on_message = on_message
        self._on_lost = on_lost
        self._operations: dict[int, WriteBatch | asyncio.Future[None]] = {}
        self._regions: list[MemoryRegion] = []
        self._pins: list[Any] = []
        self._closing: asyncio.Future[None] | None = None
        self._close_error: FabricError | None = None
        self._final: dict[str, int] | None = None
        self.connected = False
        self.lost: FabricError | None = None
        self.address = self._read_address()
        """The endpoint's name, to be given to the peer. It and the region's key are the port's only
        secrets."""

    # ---- set-up ----

    def connect(self, address: bytes) -> None:
        """Name the one peer of this port by its `address`. No traffic; the first post connects.

        ValueError for what can't be such an address, FabricError where libfabric refuses it or the port has a
        peer already.
        """
        self._check_open()
        if self.connected:
            raise FabricError(f"{self!r}: it has a peer already", name="FI_EISCONN")
        if len(address) != len(self.address):
            raise ValueError(f"address: {len(address)} bytes, this provider's have {len(self.address)}")
        if self._fabric.info.address_format in _SOCKADDR_FORMATS:
            if address[:2] != self.address[:2]:
                raise ValueError(
                    f"address: family {int.from_bytes(address[:2], 'little')}, "
                    f"this port's is {int.from_bytes(self.address[:2], 'little')}"
                )
            if address[2:4] == b"\0\0":
                raise ValueError("address: its TCP port is 0")
        code = lib.pd_port_connect(self._native, ffi.from_buffer(address))
        if code:
            raise fabric_error(f"{self!r}: fi_av_insert", code)
        self.connected = True

    def register(self, buffer: WriteableBuffer, *, key: int | None = None) -> MemoryRegion:
        """Register a writable, contiguous buffer for this port's writes and its peer's.

        Pins the buffer until the port is closed. key: None draws a fresh random one, as safety wants: a late
        packet for an earlier port at the same address must not find its key. Blocks for as long as the
        provider takes to pin the memory (tcp: microseconds).
        """
        self._check_open()
        if key is not None and not 0 <= key < 2**64:
            raise ValueError(f"key: {key} is outside 0..2**64-1")
        view = ffi.from_buffer("char[]", buffer, require_writable=True)
        if not len(view):
            raise ValueError("buffer: it is empty")
        failure = ffi.new("pd_failure *")
        wanted = secrets.randbits(KEY_BITS) if key is None else key
        native = lib.pd_region_open(self._native, view, len(view), wanted, failure)
        if native == ffi.NULL:
            ffi.release(view)
            action = ffi.string(failure.action).decode()
            raise fabric_error(f"{self!r}: {action}", failure.code)
        self._pins.append(view)
        region = MemoryRegion(self, native, len(view))
        self._regions.append(region)
        return region

    # ---- transfers ----

    def send(self, data: ReadableBuffer) -> asyncio.Future[None]:
        """Queue a message of 1..`fabric.info.max_message` bytes; they are copied now.

        The future ends at local completion, or with FabricError. Cancelling it does not cancel the message. A
        failure that nobody awaits is not logged: `on_lost` tells of it.
        """
        self._check_ready()
        with ffi.from_buffer("char[]", data) as view:
            length, limit = len(view), self._fabric.info.max_message
            if not 1 <= length <= limit:
                raise ValueError(f"data: {length} bytes is outside 1..{limit}")
            token = self._fabric._next_token()
            code = lib.pd_port_send(self._native, view, length, token)
        if code:
            raise fabric_error(f"{self!r}: send of {length} bytes", code)
        future: asyncio.Future[None] = self._loop.create_future()
        self._operations[token] = future
        self._fabric._posted()
        return future

    def write(
        self,
        region: MemoryRegion,
        src_offset: int,
        remote: RemoteRegion,
        dst_offset: int,
        length: int,
        imm: int | None = None,
    ) -> WriteBatch:
        """Write one run of `length` bytes from `region` at `src_offset` to `remote` at `dst_offset`."""
        row = (src_offset, dst_offset, length, NO_IMM if imm is None else imm)
        if imm is not None and not 0 <= imm < 2**32:
            raise ValueError(f"imm: {imm} is outside 0..{2**32 - 1}")
        for field, value in zip(("src_offset", "dst_offset", "length"), row, strict=False):
            if not 0 <= value < 2**64:
                raise ValueError(f"{field}: {value} is outside 0..2**64-1")
        return self.write_pages(region, remote, WriteTable(array("Q", row)))

    def write_pages(
        self,
        region: MemoryRegion,
        remote: RemoteRegion,
        table: WriteTable,
        *,
        src_shift: int = 0,
        dst_shift: int = 0,
    ) -> WriteBatch:
        """Queue every write of `table`, its offsets moved by the shifts (bytes, >= 0), in one native call.

        Every write is checked to lie inside `region` and `remote` before any is posted: ValueError names the
        row that does not. FabricError when the port is closing or too much is outstanding (FI_ENOSPC). On a
        port whose peer is lost the batch comes back and ends with that error. See `WriteBatch` for the end.
        """
        self._check_ready()
        if region._native is None or region._port is not self:
            raise ValueError(f"region: {region!r} is not an open region of {self!r}")
        self._check_bounds(region, remote, table, src_shift, dst_shift)
        batch = WriteBatch(self._loop, region, table)
        if not table.count:
            batch._end(None, 0, 0)
            return batch
        token = self._fabric._next_token()
        code = lib.pd_port_write(
            self._native,
            region._native,
            table._native,
            table.count,
            src_shift,
            remote.base,
            remote.key,
            dst_shift,
            token,
        )
        if code:
            error = fabric_error(f"{self!r}: write of {table.bytes} bytes", code)
            batch._end(error, 0, 0)
            raise error
        self._operations[token] = batch
        self._fabric._posted()
        return batch

    # ---- the fence ----

    async def close(self) -> None:
        """Fence the peer: when this returns nothing can land through this port any more.

        The pumping thread closes the port's libfabric objects; outstanding batches and messages end with
        FI_ECANCELED first, and `on_lost` is not called any more. Pinned buffers are given back. FabricError
        when an object refuses to close: then memory may still change, and stays pinned. Once begun the close
        goes on even if this is cancelled; calling it again waits for it. Works with or without
        `Fabric.run()`.
        """
        if self._closing is None:
            self._fabric._check_process()
            self._closing = self._loop.create_future()
            if self._fabric._pumping:
                lib.pd_port_close_begin(self._native)
                self._fabric._posted()
            else:
                self._close_now()
        await asyncio.shield(self._closing)
        if self._close_error is not None:
            raise self._close_error

    def _close_now(self) -> None:
        """Close on the spot, without the pump coroutine."""
        if self._native is None:
            return
        if self._closing is None:
            self._closing = self._loop.create_future() if not self._loop.is_closed() else None
        lib.pd_port_close_now(self._native)
        self._fabric._settle(self)

    @property
    def closed(self) -> bool:
        return self._native is None

    @property
    def closing(self) -> bool:
        return self._closing is not None

    async def __aenter__(self) -> Port:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def statistics(self) -> dict[str, Any]:
        """Counts since the open (writes, bytes, messages, immediates, EAGAINs, CQ errors) and gauges (queued,
        in flight, regions). Frozen once closed."""
        return {
            "name": self.name,
            "provider": self._fabric.info.provider,
            "connected": self.connected,
            "lost": self.lost.name if self.lost else None,
            "closed": self.closed,
            "regions": sum(not region.closed for region in self._regions),
            "operations": len(self._operations),
            **(self._final if self._final is not None else self._read_statistics()),
        }

    def __repr__(self) -> str:
        return f"Port({self.name!r})"

    # ---- for the pump ----

    def _handle(
        self, kind: int, error: int, provider_error: int, token: int, value: int, ns: tuple[int, int]
    ) -> None:
        if kind in (_WRITTEN, _SENT):
            self._operation_ended(token, error, provider_error, ns)
        elif kind == _RECEIVED:
            self._received(token, value)
        elif kind == _LOST:
            self._peer_lost(error, provider_error)
        elif kind == _CLOSED:
            self._was_closed(error)

    def _operation_ended(self, token: int, error: int, provider_error: int, ns: tuple[int, int]) -> None:
        operation = self._operations.pop(token)
        failure = None
        if error:
            what = "write" if isinstance(operation, WriteBatch) else "send"
            failure = fabric_error(f"{self!r}: {what}", error, provider_code=provider_error)
        if isinstance(operation, WriteBatch):
            callbacks: list[DoneCallback] = operation._end(failure, *ns)
            for callback in callbacks:
                callback(failure)
        elif not operation.done() and not self._loop.is_closed():
            if failure is None:
                operation.set_result(None)
            else:
                operation.set_exception(failure)
                operation.exception()  # on_lost tells of it: no log line for a future nobody awaits

    def _received(self, index: int, length: int) -> None:
        if self._closing is not None:
            return
        data = ffi.buffer(lib.pd_port_received(self._native, index), length)[:]
        lib.pd_port_repost(self._native, index)
        self._fabric._posted()
        self._on_message(data)

    def _peer_lost(self, error: int, provider_error: int) -> None:
        if self._closing is not None:
            return
        self.lost = fabric_error(f"{self!r}: the peer is lost", error, provider_code=provider_error)
        self._on_lost(self.lost)

    def _was_closed(self, error: int) -> None:
        self._final = self._read_statistics()
        lib.pd_port_free(self._native)
        self._native = None
        for region in self._regions:
            region._forget()
        if error:
            self._close_error = fabric_error(f"{self!r}: close", error)
        else:
            for pin in self._pins:
                ffi.release(pin)
            self._pins.clear()
        self._fabric._port_gone(self)
        if self._closing is not None and not self._closing.done() and not self._loop.is_closed():
            self._closing.set_result(None)

    # ---- checks ----

    def _check_open(self) -> None:
        self._fabric._check_process()
        if self._closing is not None or self._native is None:
            raise FabricError(f"{self!r}: it is closed", name=code_name(FI_ECANCELED), errno=FI_ECANCELED)

    def _check_ready(self) -> None:
        self._check_open()
        if not self.connected:
            raise FabricError(f"{self!r}: it has no peer yet, call connect()", name="FI_ENOTCONN")

    def _check_bounds(
        self, region: MemoryRegion, remote: RemoteRegion, table: WriteTable, src_shift: int, dst_shift: int
    ) -> None:
        if src_shift < 0 or dst_shift < 0:
            raise ValueError(f"src_shift {src_shift}, dst_shift {dst_shift}: negative")
        if table.max_length > self._fabric.info.max_write:
            raise ValueError(
                f"length: {table.max_length} is over this provider's {self._fabric.info.max_write}"
            )
        if table.src_end + src_shift > region.length:
            self._out_of_bounds("src", "region", table, src_shift, region.length)
        if table.dst_end + dst_shift > remote.length:
            self._out_of_bounds("dst", "remote", table, dst_shift, remote.length)

    def _out_of_bounds(self, side: str, target: str, table: WriteTable, shift: int, limit: int) -> None:
        for number in range(table.count):
            row = table._native[number]
            offset = row.src if side == "src" else row.dst
            if offset + row.length + shift > limit:
                raise ValueError(
                    f"{side}_offset: row {number}'s {offset} + length {row.length} + {side}_shift {shift} "
                    f"is beyond the {limit} bytes of {target}"
                )
        raise ValueError(f"{side}_shift: {shift} is beyond the {limit} bytes of {target}")

    # ---- native reads ----

    def _read_address(self) -> bytes:
        room = ffi.new("char[]", 256)
        length = ffi.new("size_t *", 256)
        code = lib.pd_port_address(self._native, room, length)
        if code:
            raise fabric_error(f"{self!r}: fi_getname", code)
        return bytes(ffi.buffer(room, length[0]))

    def _read_statistics(self) -> dict[str, int]:
        out = ffi.new("pd_port_statistics *")
        lib.pd_port_read_statistics(self._native, out)
        return {field: int(getattr(out, field)) for field, _ in ffi.typeof("pd_port_statistics").fields}
