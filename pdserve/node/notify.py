"""Telling the service manager how a node is doing: the protocol of `sd_notify(3)`, without a library.

A state is one datagram of `NAME=value` lines to the socket that `NOTIFY_SOCKET` names. Nothing is ever
awaited and nothing blocks the loop: a datagram that the socket does not take at once is kept, in order, and
sent when it does. Without a service manager every method does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from pdserve.config import notify_socket, watchdog_interval
from pdserve.errors import ConfigError

_MAX_KEPT = 64
"""Datagrams kept for a socket that takes none; beyond it the oldest goes, as an older state matters least."""


class Notifier:
    """The node's end of the notification socket. Owned by the node; use as a context manager.

    Used from the event loop's thread alone. A service manager that has gone away is no error: what is sent
    to it is dropped.
    """

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        """`address`: an absolute path, or `@name` in the abstract namespace; None: nobody listens.

        `watchdog_s`: seconds between two signs of life. Raises `ConfigError` for another kind of address.
        """
        self.watchdog_s = watchdog_s
        self._kept: deque[bytes] = deque(maxlen=_MAX_KEPT)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: socket.socket | None = None
        self._connected = False
        if address is None:
            return
        if address[0] not in "/@" or len(address) < 2:
            raise ConfigError(
                f"NOTIFY_SOCKET = {address!r}: expected an absolute path or @name", param="NOTIFY_SOCKET"
            )
        self._address = "\0" + address[1:] if address[0] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    @classmethod
    def from_environment(cls) -> Notifier:
        """The one that `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` describe."""
        return cls(notify_socket(), watchdog_interval())

    def __enter__(self) -> Notifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    @property
    def listening(self) -> bool:
        """Whether there is anybody to tell."""
        return self._socket is not None

    def ready(self, status: str = "") -> None:
        """Start-up (or a reload) is complete: the unit becomes active."""
        self._send("READY=1", *_status(status))

    def status(self, text: str) -> None:
        """One line for people, shown by `systemctl status`."""
        self._send(*_status(text))

    def extend_timeout(self, seconds: float) -> None:
        """Starting or stopping goes on: do not give up for so long from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str = "") -> None:
        """Shutdown begins."""
        self._send("STOPPING=1", *_status(status))

    def watchdog(self) -> None:
        """One sign of life."""
        self._send("WATCHDOG=1")

    async def keep_alive(self, alive: Callable[[], bool]) -> None:
        """Give signs of life as often as asked for, while `alive()` says so; the node runs this as a task.

        Returns at once where no watchdog is asked for; otherwise runs until cancelled. When `alive()` is
        false the sign is left out, and after `WatchdogSec` the service manager restarts the node.
        """
        if self._socket is None or self.watchdog_s is None:
            return
        while True:
            if alive():
                self.watchdog()
            await asyncio.sleep(self.watchdog_s)

    def close(self) -> None:
        """Try once more to send what was kept, then close. Idempotent."""
        if self._socket is None:
            return
        self._flush()
        self._unwatch()
        self._socket.close()
        self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None or not lines:
            return
        self._kept.append("\n".join(lines).encode())
        self._flush()

    def _flush(self) -> None:
        assert self._socket is not None
        while self._kept:
            try:
                if not self._connected:
                    # Only a connected datagram socket tells the poller when its peer takes more.
                    self._socket.connect(self._address)
                    self._connected = True
                self._socket.send(self._kept[0])
            except (BlockingIOError, InterruptedError):
                self._watch()
                return
            except OSError:
                # Nobody is there (any more); the next message asks again.
                self._connected = False
            self._kept.popleft()
        self._unwatch()

    def _watch(self) -> None:
        """Send the rest when the socket takes it. Outside a loop the next message tries again."""
        if self._loop is None and self._socket is not None:
            with contextlib.suppress(RuntimeError):
                self._loop = asyncio.get_running_loop()
                self._loop.add_writer(self._socket.fileno(), self._flush)

    def _unwatch(self) -> None:
        if self._loop is not None and self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_writer(self._socket.fileno())
            self._loop = None


def _status(text: str) -> tuple[str, ...]:
    """A line feed would begin another assignment, so there is none."""
    return (f"STATUS={' '.join(text.split())}",) if text else ()
