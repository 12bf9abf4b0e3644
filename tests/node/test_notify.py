"""The notification protocol over real sockets, in the file system and in the abstract namespace."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.node.notify import Notifier


class ServiceManager:
    """The other end: a bound datagram socket, read without waiting."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self.socket.setblocking(False)

    def heard(self) -> list[dict[str, str]]:
        messages = []
        while True:
            try:
                data = self.socket.recv(65536)
            except BlockingIOError:
                return messages
            messages.append(dict(line.split("=", 1) for line in data.decode().split("\n")))


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    path = str(tmp_path / "notify") if request.param == "path" else f"@pdserve-test-{uuid.uuid4().hex}"
    manager = ServiceManager(path)
    yield manager
    manager.socket.close()


def test_states(manager: ServiceManager) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    with Notifier(manager.address) as notifier:
        assert notifier.listening
        notifier.status("loading weights\n42%")
        notifier.extend_timeout(90)
        notifier.ready("serving")
        notifier.reloading()
        notifier.ready()
        notifier.watchdog()
        notifier.stopping("draining 3 requests")
        notifier.status("")
    status, extend, ready, reloading, again, watchdog, stopping = manager.heard()
    assert status == {"STATUS": "loading weights 42%"}
    assert extend == {"EXTEND_TIMEOUT_USEC": "90000000"}
    assert ready == {"READY": "1", "STATUS": "serving"}
    assert reloading["RELOADING"] == "1"
    assert before <= int(reloading["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert again == {"READY": "1"}
    assert watchdog == {"WATCHDOG": "1"}
    assert stopping == {"STOPPING": "1", "STATUS": "draining 3 requests"}


def test_reads_the_environment(manager: ServiceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    with Notifier.from_environment() as notifier:
        notifier.ready()
        assert notifier.watchdog_s == 1.0
    assert manager.heard() == [{"READY": "1"}]


async def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    with Notifier.from_environment() as notifier:
        assert not notifier.listening
        notifier.ready("x")
        notifier.stopping()
        await notifier.keep_alive(lambda: True)
    notifier.close()


@pytest.mark.parametrize("address", ["relative/path", "vsock:2:1234", "@", "/"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="NOTIFY_SOCKET"):
        Notifier(address)


def test_a_service_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with Notifier(address) as notifier:
        notifier.ready()
        manager = ServiceManager(address)
        notifier.status("one")
        assert manager.heard() == [{"STATUS": "one"}]
        manager.socket.close()
        notifier.status("two")
        os.unlink(address)
        notifier.status("three")
        manager = ServiceManager(address)
        notifier.status("four")
        assert manager.heard() == [{"STATUS": "four"}]
        manager.socket.close()


# The kernel queues so many datagrams of a socket.
QUEUED = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())


async def test_what_the_socket_does_not_take_is_sent_later_and_in_order(manager: ServiceManager) -> None:
    total = QUEUED + 30
    with Notifier(manager.address) as notifier:
        for number in range(total):
            notifier.status(str(number))
        heard = manager.heard()
        assert 0 < len(heard) < total
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(manager.socket.fileno(), arrived.set)
        while len(heard) < total:
            await arrived.wait()
            arrived.clear()
            heard += manager.heard()
        loop.remove_reader(manager.socket.fileno())
    assert [message["STATUS"] for message in heard] == [str(number) for number in range(total)]


async def test_keep_alive_is_a_sign_of_life_and_only_of_life(manager: ServiceManager) -> None:
    asked = asyncio.Event()
    alive = True

    def is_alive() -> bool:
        asked.set()
        return alive

    with Notifier(manager.address, watchdog_s=0.001) as notifier:
        task = asyncio.create_task(notifier.keep_alive(is_alive))
        await asked.wait()
        assert {"WATCHDOG": "1"} in manager.heard()
        alive = False
        manager.heard()
        for _ in range(2):
            asked.clear()
            await asked.wait()
        assert manager.heard() == []
        task.cancel()
        await asyncio.wait([task])
