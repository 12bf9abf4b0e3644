"""A fabric: one provider opened once, its ports, and the pump that serves them all."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from pdserve.errors import FabricError
from pdserve.fabric import library
from pdserve.fabric._core import ffi, lib
from pdserve.fabric.config import FabricConfig, ProviderInfo
from pdserve.fabric.convert import FI_EBUSY, FI_EOPBADSTATE, code_name, fabric_error
from pdserve.fabric.imm import ImmCounters
from pdserve.fabric.port import Port

TURN = 128
"""Records handled before the event loop gets its turn."""
RETRY_S = 0.02
"""Inline: how long posts that were refused wait for an event before they are tried again."""

_Record = tuple[int, int, int, int, int, int, tuple[int, int]]


def native_handles() -> dict[str, int]:
    """Live native objects of this process, by kind. All zero when everything has been closed."""
    out = ffi.new("pd_handles *")
    lib.pd_handles_read(out)
    return {field: int(getattr(out, field)) for field, _ in ffi.typeof("pd_handles").fields}


def open_handles() -> int:
    """How many they are, all together."""
    return sum(native_handles().values())


class Fabric:
    """An open provider. `async with Fabric.open(config) as fabric:` closes ports and all at the end.

    Belongs to one event loop and one process: after a fork every use raises, and nothing is closed there (the
    child shares the parent's sockets and epoll sets). `run()` must be running for anything to complete.
    """

    def __init__(self, config: FabricConfig, native: Any, info: ProviderInfo) -> None:
        self.config = config
        self.info = info
        self._native = native
        self._process = os.getpid()
        self._ports: dict[int, Port] = {}
        self._counters: Counter[ImmCounters] = Counter()
        self._backlog: deque[_Record] = deque()
        self._records = ffi.new("pd_record[]", TURN)
        self._token = 0
        self._opened = 0
        self._turns = 0
        self._pumping = False
        self._woken = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        _open.add(self)

    # ---- life ----

    @classmethod
    def open(cls, config: FabricConfig | None = None) -> Fabric:
        """Load libfabric, open the provider, start the native thread in thread mode. Blocks for some 20 ms
        the first time. FabricError names what was refused."""
        config = config or FabricConfig()
        path = library.load(config.library)
        names = [ffi.new("char[]", text.encode()) for text in (config.provider_name, config.host)]
        settings = ffi.new(
            "pd_config *",
            {
                "provider": names[0],
                "host": names[1],
                "recv_buffers": config.recv_buffers,
                "recv_size": config.recv_size,
                "max_inflight_writes": config.max_inflight_writes,
                "max_inflight_sends": config.max_inflight_sends,
                "cq_size": config.recv_buffers
                + config.max_inflight_writes
                + config.max_inflight_sends
                + 1024,
                "ring_size": config.max_outstanding,
                "post_quantum": config.quantum,
                "drain_quantum": max(config.quantum, 16),
                "dead_after_ns": int(config.dead_after_s * 1e9),
                "threaded": int(config.threaded),
                "cpu": -1 if config.cpu is None else config.cpu,
            },
        )
        found, failure = ffi.new("pd_info *"), ffi.new("pd_failure *")
        native = lib.pd_fabric_open(settings, found, failure)
        if native == ffi.NULL:
            action = ffi.string(failure.action).decode()
            raise fabric_error(
                f"fabric: {action} for provider {config.provider_name!r} on {config.host!r} with libfabric "
                f"{library.version()} at {path} (it must offer RDM, MSG, RMA and 4 bytes of remote CQ data "
                "by itself, not through ofi_rxm)",
                failure.code,
            )
        fabric = cls(config, native, _describe(config, found, path))
        try:
            fabric._probe()
        except BaseException:
            fabric.close_now()
            raise
        return fabric

    def _probe(self) -> None:
        """Open and close a port: libfabric takes any address for its own until something is bound to it."""
        counters = ImmCounters()
        native = self._open_native(0, counters, f"a first port on {self.config.host!r}")
        code = lib.pd_port_close_now(native)
        self._take()
        self._backlog.clear()
        lib.pd_port_free(native)
        if code:
            raise fabric_error("fabric: closing a first port", code)

    def _open_native(self, number: int, counters: ImmCounters, what: str) -> Any:
        failure = ffi.new("pd_failure *")
        native = lib.pd_port_open(self._native, number, counters._native, failure)
        if native == ffi.NULL:
            action = ffi.string(failure.action).decode()
            raise fabric_error(f"fabric: opening {what}: {action}", failure.code)
        return native

    async def open_port(
        self,
        counters: ImmCounters,
        *,
        name: str = "",
        on_message: Callable[[bytes], None],
        on_lost: Callable[[FabricError], None],
    ) -> Port:
        """Open a port for one peer (0.3 ms). Immediates written to it are counted in `counters`, which may be
        shared with other ports. FabricError when libfabric or a limit (descriptors, `max_outstanding`)
        refuses.
        """
        self._check_process()
        if self._native is None:
            raise FabricError("fabric: it is closed", name=code_name(FI_EOPBADSTATE), errno=FI_EOPBADSTATE)
        self._opened += 1
        number = self._opened
        native = self._open_native(number, counters, f"a port for {name or number!r}")
        port = Port(self, native, number, name, counters, on_message, on_lost)
        self._ports[number] = port
        self._counters[counters] += 1
        self._posted()
        return port

    async def close(self) -> None:
        """Close every port (see `Port.close`), then the provider; `run()` returns. Safe to call twice."""
        if self._native is None:
            return
        self._check_process()
        ports = list(self._ports.values())
        results = await asyncio.gather(*(port.close() for port in ports), return_exceptions=True)
        self._finish_close()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def close_now(self) -> None:
        """The same, at once and without an event loop; `run()` must have ended."""
        if self._native is None:
            return
        self._check_process()
        for port in list(self._ports.values()):
            port._close_now()
        self._finish_close()

    def _finish_close(self) -> None:
        if self._ports:
            raise FabricError(
                f"fabric: {len(self._ports)} ports are still open", name="FI_EBUSY", errno=FI_EBUSY
            )
        if self._pumping and self._loop is not None:
            self._loop.remove_reader(lib.pd_fabric_fd(self._native))
        code = lib.pd_fabric_close(self._native)
        if code:
            raise fabric_error("fabric: close", code)
        self._native = None
        self._wake()

    async def __aenter__(self) -> Fabric:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __enter__(self) -> Fabric:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_now()

    def __del__(self) -> None:
        if getattr(self, "_native", None) is not None and self._process == os.getpid():
            # The native thread may be reading its tables and buffers: better kept for ever than freed under
            # it.
            _abandoned.append(self)
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"Fabric({self.info.provider}, {len(self._ports)} ports)"

    def statistics(self) -> dict[str, Any]:
        """Provider, mode, counts of the pump, and `handles` (live native objects of the whole process)."""
        pump: dict[str, int] = {}
        if self._native is not None:
            out = ffi.new("pd_pump_statistics *")
            lib.pd_fabric_statistics(self._native, out)
            pump = {field: int(getattr(out, field)) for field, _ in ffi.typeof("pd_pump_statistics").fields}
        return {
            "provider": self.info.provider,
            "version": self.info.version,
            "mode": self.info.mode,
            "ports": len(self._ports),
            "turns": self._turns,
            "pump": pump,
            "handles": native_handles(),
        }

    # ---- the pump ----

    async def run(self) -> None:
        """Pump completions until cancelled or until the fabric is closed. One at a time.

        Each turn runs the callbacks of at most TURN records, then lets the loop go on. Sleeps on one
        descriptor: the native thread's eventfd, or inline an epoll set over all ports. An exception from a
        callback ends it; nothing is lost by that, nor by cancelling: a later `run()` goes on where this one
        stopped.
        """
        self._check_process()
        if self._pumping:
            raise FabricError("fabric: run() is running already", name="FI_EBUSY", errno=FI_EBUSY)
        if self._native is None:
            return
        self._loop = asyncio.get_running_loop()
        threaded = self.config.threaded
        descriptor = lib.pd_fabric_fd(self._native)
        self._loop.add_reader(descriptor, self._poked if threaded else self._wake)
        self._pumping = True
        try:
            if threaded:
                await self._serve_thread()
            else:
                await self._serve_inline()
        finally:
            self._pumping = False
            if self._native is not None:
                self._loop.remove_reader(descriptor)
                for port in [port for port in self._ports.values() if port.closing]:
                    self._settle(port)

    async def _serve_thread(self) -> None:
        while self._native is not None:
            self._woken = False
            if self._turn():
                await asyncio.sleep(0)
            else:
                await self._sleep(None)

    async def _serve_inline(self) -> None:
        while self._native is not None:
            self._woken = False
            bits = lib.pd_fabric_pass(self._native)
            if self._turn() or bits & lib.PD_MORE:
                await asyncio.sleep(0)
                continue
            if self._woken:
                continue  # a callback posted: pass again before going to sleep on it
            if self._native is None:
                return
            # After the last drain and the last post; nothing may touch a CQ between this and the sleep.
            bits = lib.pd_fabric_arm(self._native)
            if bits & lib.PD_MORE:
                await asyncio.sleep(0)
            elif await self._sleep(RETRY_S if bits & lib.PD_PENDING else None) and self._native is not None:
                lib.pd_fabric_retry(self._native)

    async def _sleep(self, timeout: float | None) -> bool:
        """Until something wakes us; True if it was the time-out."""
        if self._woken or self._loop is None:
            return False
        waiter = self._waiter = self._loop.create_future()
        timer = None if timeout is None else self._loop.call_later(timeout, _expire, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        return not self._woken

    def _poked(self) -> None:
        lib.pd_fabric_reset(self._native)
        self._wake()

    def _wake(self) -> None:
        self._woken = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _turn(self) -> bool:
        """One bounded helping of callbacks. True when more are waiting."""
        self._turns += 1
        # Counts before records: a peer that wrote everything and then died has completed its slots.
        for counters in list(self._counters):
            counters._deliver()
        if not self._backlog:
            self._take()
        full = len(self._backlog) >= TURN
        for _ in range(min(len(self._backlog), TURN)):
            self._dispatch(self._backlog.popleft())
        return full or bool(self._backlog)

    def _take(self) -> int:
        if self._native is None:
            return 0
        found = int(lib.pd_fabric_take(self._native, self._records, TURN))
        for index in range(found):
            r = self._records[index]
            ns = (r.started_ns, r.ended_ns)
            self._backlog.append((r.port, r.kind, r.error, r.provider_error, r.token, r.value, ns))
        return found

    def _dispatch(self, record: _Record) -> None:
        port = self._ports.get(record[0])
        if port is not None:
            port._handle(*record[1:])

    def _settle(self, port: Port) -> None:
        """Bring a closing port to its end without `run()`: its records only, the others wait their turn."""
        if port._native is None:
            return
        lib.pd_fabric_barrier(self._native)
        while self._take() == TURN:
            pass
        port.counters._deliver()
        kept: deque[_Record] = deque()
        failures: list[BaseException] = []
        for record in self._backlog:
            if record[0] != port.number:
                kept.append(record)
                continue
            try:
                self._dispatch(record)
            except Exception as error:  # every record must be handled: the close ends in the last one
                failures.append(error)
        self._backlog = kept
        if failures:
            raise failures[0]

    # ---- for ports ----

    def _next_token(self) -> int:
        self._token += 1
        return self._token

    def _posted(self) -> None:
        """Inline, what was queued goes out in the next pass; the native thread has been told already."""
        if not self.config.threaded:
            self._wake()

    def _port_gone(self, port: Port) -> None:
        del self._ports[port.number]
        self._counters[port.counters] -= 1
        if not self._counters[port.counters]:
            del self._counters[port.counters]

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise FabricError(
                f"fabric: opened by process {self._process}, used in its fork {os.getpid()}: "
                "start processes by spawn",
                name=code_name(FI_EOPBADSTATE),
                errno=FI_EOPBADSTATE,
            )


_abandoned: list[Fabric] = []
_open: weakref.WeakSet[Fabric] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A native thread must not outlive the interpreter whose memory it reads."""
    for fabric in [*_open, *_abandoned]:
        if fabric._process == os.getpid():
            with contextlib.suppress(Exception):
                fabric.close_now()


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _describe(config: FabricConfig, found: Any, path: str) -> ProviderInfo:
    def text(field: Any) -> str:
        return str(ffi.string(field).decode(errors="replace"))

    return ProviderInfo(
        provider=text(found.provider),
        fabric=text(found.fabric),
        domain=text(found.domain),
        version=library.version(),
        path=path,
        mode="thread" if config.threaded else "inline",
        mr_mode=int(found.mr_mode),
        max_message=min(int(found.max_message), config.recv_size),
        max_write=int(found.max_message),
        cq_data_size=int(found.cq_data_size),
        address_format=int(found.address_format),
    )
