"""What goes wrong: miscounts, killed and silent peers, fences under fire, leaks, forks, bad arguments."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from pdserve.errors import ConfigError
from pdserve.fabric import (
    NO_IMM,
    Fabric,
    FabricConfig,
    FabricError,
    ImmCounters,
    RemoteRegion,
    WriteBatch,
    WriteTable,
    native_handles,
    pack_imm,
)

from .conftest import OpenPair, local_side, remote_peer, soon


async def outcome(batch: WriteBatch) -> str | None:
    try:
        await batch
    except FabricError as error:
        return error.name
    return None


async def until(condition: Callable[[], bool]) -> None:
    """Look every millisecond; the test's time-out bounds it."""
    while not condition():  # noqa: ASYNC110 - what is waited for is in another process
        await asyncio.sleep(0.001)


# ---- counts ----


async def test_stale_immediates_are_counted_and_ignored(open_pair: OpenPair) -> None:
    side, peer = await open_pair()
    done = side.arm(3, 7, 1)
    rows: list[int] = []
    for imm in (pack_imm(3, 6, 1), pack_imm(4, 7, 5), pack_imm(3, 8, 256), pack_imm(4095, 4095, 1)):
        rows += [0, 0, 64, imm]
    await peer.ask("write", rows=[*rows, 0, 0, 64, pack_imm(3, 7, 1)])
    assert await soon(done) == 1
    await until(lambda: side.counters.stale == 4)
    assert side.counters.count(3) == 1


async def test_overshoot_is_told_once(open_pair: OpenPair) -> None:
    side, peer = await open_pair()
    told: list[tuple[str, int]] = []
    over = asyncio.Event()

    def overshot(slot: int, count: int) -> None:
        told.append(("over", count))
        over.set()

    side.counters.arm(
        1,
        1,
        10,
        on_complete=lambda s: told.append(("complete", side.counters.count(s))),
        on_overshoot=overshot,
    )
    await peer.ask("write", rows=[0, 0, 64, pack_imm(1, 1, 10)])
    await until(lambda: bool(told))
    assert told == [("complete", 10)]
    await peer.ask("write", rows=[0, 0, 64, pack_imm(1, 1, 3)])
    await soon(over.wait())
    await peer.ask("write", rows=[0, 0, 64, pack_imm(1, 1, 1)])
    await until(lambda: side.counters.count(1) == 14)
    assert told == [("complete", 10), ("over", 13)]


async def test_a_disarmed_slot_is_silent_and_its_next_generation_starts_at_zero(open_pair: OpenPair) -> None:
    side, peer = await open_pair()
    first = side.arm(5, 0, 2)
    await peer.ask("write", rows=[0, 0, 64, pack_imm(5, 0, 1)])
    await until(lambda: side.counters.count(5) == 1)
    assert side.counters.disarm(5) == 1
    assert side.counters.disarm(5) == 0
    second = side.arm(5, 1, 2)
    await peer.ask("write", rows=[0, 0, 64, pack_imm(5, 0, 1), 0, 0, 64, pack_imm(5, 1, 2)])
    assert await soon(second) == 2
    assert not first.done()
    await until(lambda: side.counters.stale == 1)


async def test_progress_is_told_while_it_is_wanted(open_pair: OpenPair) -> None:
    side, peer = await open_pair()
    seen: list[tuple[int, int]] = []
    side.counters.on_progress = lambda slot, count: seen.append((slot, count))
    done = side.arm(2, 2, 3)
    for count in (1, 2, 3):
        await peer.ask("write", rows=[0, 0, 64, pack_imm(2, 2, 1)])
        await until(lambda count=count: (2, count) in seen)  # type: ignore[misc]
    assert await soon(done) == 3
    side.counters.on_progress = None
    side.counters.disarm(2)
    assert seen == [(2, 1), (2, 2), (2, 3)]


# ---- peers that go ----


async def test_a_killed_receiver_is_told_and_its_batches_end(open_pair: OpenPair) -> None:
    side, peer = await open_pair(8 << 20, fresh=True)
    table = WriteTable.of([(n << 18, n << 18, 1 << 18, NO_IMM) for n in range(32)])
    assert await soon(outcome(side.port.write(side.region, 0, peer.remote, 0, 64))) is None
    batches = [side.port.write_pages(side.region, peer.remote, table) for _ in range(64)]
    peer.kill()
    error = await soon(side.lost.get())
    assert error.name.startswith("FI_")
    assert (side.port.lost, side.port.statistics()["lost"]) == (error, error.name)
    waiting = asyncio.gather(*(outcome(batch) for batch in batches))
    # What was in flight may only end with the port: until then the NIC may read its source.
    await side.port.close()
    names = await soon(waiting)
    assert names[-1] == error.name
    assert all(batch.done for batch in batches)
    assert side.lost.empty()


async def test_a_post_to_a_lost_peer_ends_with_its_error(open_pair: OpenPair) -> None:
    side, peer = await open_pair(fresh=True)
    await soon(outcome(side.port.write(side.region, 0, peer.remote, 0, 64)))
    peer.kill()
    # Nothing may announce the death of an idle peer; then the next posts run into it, sooner or later.
    first = side.port.write(side.region, 0, peer.remote, 0, 1 << 20)
    await soon(outcome(first))
    side.port.send(b"anyone?")
    error = await soon(side.lost.get())
    assert await soon(outcome(side.port.write(side.region, 0, peer.remote, 0, 64))) == error.name
    with pytest.raises(FabricError) as caught:
        await soon(side.port.send(b"no?"))
    assert caught.value.name == error.name


async def test_a_killed_sender_leaves_the_receiver_able_to_close(open_pair: OpenPair) -> None:
    side, peer = await open_pair(8 << 20, fresh=True)
    rows: list[int] = []
    for n in range(32):
        rows += [n << 18, n << 18, 1 << 18, pack_imm(1, 1, 1)]
    side.arm(1, 1, 1 << 30)
    await peer.ask("flood", rows=rows)
    await until(lambda: side.counters.count(1) > 100)
    peer.kill()
    await soon(side.port.close())


async def test_a_stopped_peer_starves_nobody(mode: str) -> None:
    """While one peer's process stands still, another's pages all arrive."""
    async with (
        remote_peer(mode, 8 << 20, fresh=True) as stopped,
        remote_peer(mode, 8 << 20) as healthy,
        local_side(mode, 8 << 20) as side,
    ):
        await side.join(stopped)
        first = side.port
        table = WriteTable.of([(n << 18, n << 18, 1 << 18, NO_IMM) for n in range(32)])
        assert await soon(outcome(first.write(side.region, 0, stopped.remote, 0, 64))) is None
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            stuck = [first.write_pages(side.region, stopped.remote, table) for _ in range(8)]
            await side.join(healthy)
            moved = [side.port.write_pages(side.region, healthy.remote, table) for _ in range(8)]
            assert await soon(asyncio.gather(*(outcome(batch) for batch in moved))) == [None] * 8
            assert not stuck[-1].done
            await soon(first.close())
            assert stuck[-1].error is not None
            assert stuck[-1].error.name == "FI_ECANCELED"
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)


async def test_a_wrong_key_changes_nothing_here(open_pair: OpenPair) -> None:
    side, peer = await open_pair()
    await peer.ask("fill", seed=2)
    await peer.ask("unchecked", rows=[0, 0, 4096, pack_imm(0, 0, 1)], key=side.region.key ^ 1, length=1 << 20)
    peer.tell("unchecked", rows=[0, (1 << 20) - 64, 4096, NO_IMM], key=side.region.key, length=1 << 30)
    await soon(side.port.close())
    await peer.answer()
    assert not any(side.arena[:])


async def test_a_stranger_on_the_socket_is_no_loss(open_pair: OpenPair) -> None:
    """Anyone can connect to a port's TCP address and hang up; the peer's link must not care."""
    side, peer = await open_pair()
    await peer.ask("fill", seed=2)
    address = ("127.0.0.1", int.from_bytes(side.port.address[2:4], "big"))
    loop = asyncio.get_running_loop()
    for noise in (b"", b"\0" * 8, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096):
        with socket.socket() as stranger:
            stranger.setblocking(False)
            await loop.sock_connect(stranger, address)
            if noise:
                await loop.sock_sendall(stranger, noise)
    done = side.arm(1, 1, 1)
    await peer.ask("write", rows=[0, 0, 4096, pack_imm(1, 1, 1)])
    assert await soon(done) == 1
    assert side.lost.empty()


# ---- the fence ----


async def test_nothing_lands_after_a_close_under_fire(mode: str) -> None:
    """A peer writes at full speed; the port closes; from then on the memory is ours."""
    size = 4 << 20
    async with local_side(mode, size) as side, remote_peer(mode, size) as peer:
        await peer.ask("fill", seed=1)
        for page in (1 << 20, 1 << 14):
            rows: list[int] = []
            for n in range(size // page):
                rows += [n * page, n * page, page, pack_imm(1, page >> 14, 1)]
            for _ in range(3):
                await side.join(peer)
                side.counters.arm(1, page >> 14, 1 << 30, on_complete=lambda _: None)
                await peer.ask("flood", rows=rows)
                await until(lambda: side.counters.count(1) > 64)
                await soon(side.port.close())
                side.arena[:] = b"\x5a" * size
                side.counters.disarm(1)
                await peer.ask("close")
                # The writer has closed as well: whatever it had under way has had its chance.
                assert side.arena[:] == b"\x5a" * size


async def test_close_ends_what_is_in_flight(open_pair: OpenPair) -> None:
    side, peer = await open_pair(8 << 20)
    table = WriteTable.of([(n << 18, n << 18, 1 << 18, NO_IMM) for n in range(32)])
    batches = [side.port.write_pages(side.region, peer.remote, table) for _ in range(50)]
    sends = [side.port.send(b"x" * 1000) for _ in range(50)]
    ended: list[str | None] = []
    for batch in batches:
        batch.add_done_callback(lambda error: ended.append(error.name if error else None))
    await soon(side.port.close())
    assert len(ended) == 50
    assert set(ended) <= {None, "FI_ECANCELED"}
    assert ended[-1] == "FI_ECANCELED"
    assert all(batch.done for batch in batches)
    assert all(sent.done() for sent in sends)
    assert side.lost.empty()
    assert native_handles()["operations"] == 0
    for use in (
        lambda: side.port.send(b"x"),
        lambda: side.port.write(side.region, 0, peer.remote, 0, 1),
        lambda: side.port.connect(peer.address),
        lambda: side.port.register(bytearray(8)),
    ):
        with pytest.raises(FabricError, match="closed"):
            use()
    statistics = side.port.statistics()
    assert statistics["closed"] is True
    assert statistics["operations"] == 0


async def test_a_cancelled_close_goes_on(open_pair: OpenPair) -> None:
    side, _ = await open_pair()
    closing = asyncio.ensure_future(side.port.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await soon(side.port.close())
    assert side.port.closed


async def test_ports_close_without_the_pump(mode: str) -> None:
    """After `run()` has been cancelled, close still fences and settles everything."""
    async with remote_peer(mode, 1 << 20) as peer, Fabric.open(FabricConfig(mode=mode)) as fabric:  # type: ignore[arg-type]
        counters = ImmCounters()
        pump = asyncio.create_task(fabric.run())
        port = await fabric.open_port(counters, on_message=lambda _: None, on_lost=lambda _: None)
        region = port.register(bytearray(1 << 20))
        await peer.open()
        port.connect(peer.address)
        pump.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pump
        batch = port.write(region, 0, peer.remote, 0, 1 << 20)
        await soon(port.close())
        assert batch.done
        assert port.closed


async def test_a_close_under_way_survives_the_end_of_the_pump(open_pair: OpenPair) -> None:
    side, _ = await open_pair()
    async with Fabric.open(FabricConfig(mode=side.fabric.config.mode)) as fabric:
        pump = asyncio.create_task(fabric.run())
        port = await fabric.open_port(ImmCounters(), on_message=lambda _: None, on_lost=lambda _: None)
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(port.close())
        await asyncio.sleep(0)
        pump.cancel()
        await soon(closing)
        assert port.closed


async def test_an_exception_in_a_callback_ends_run_and_loses_nothing(open_pair: OpenPair) -> None:
    side, _ = await open_pair()
    async with Fabric.open(FabricConfig(mode=side.fabric.config.mode)) as fabric:
        heard: list[bytes] = []

        def hear(message: bytes) -> None:
            heard.append(message)
            if message == b"bad":
                raise RuntimeError("planted")

        port = await fabric.open_port(ImmCounters(), on_message=hear, on_lost=lambda _: None)
        other = await side.fabric.open_port(ImmCounters(), on_message=lambda _: None, on_lost=lambda _: None)
        other.connect(port.address)
        for message in (b"good", b"bad", b"after"):
            other.send(message)
        with pytest.raises(RuntimeError, match="planted"):
            await soon(fabric.run())
        pump = asyncio.create_task(fabric.run())
        await until(lambda: heard == [b"good", b"bad", b"after"])
        await soon(fabric.close())
        await soon(pump)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_fifty_open_transfer_close_cycles_leak_nothing(mode: str) -> None:
    async with local_side(mode, 1 << 16) as side, remote_peer(mode, 1 << 16) as peer:
        await peer.ask("fill", seed=4)
        before = 0
        for cycle in range(50):
            await side.join(peer)
            done = side.arm(cycle, cycle, 4)
            rows: list[int] = []
            for n in range(4):
                rows += [n << 14, n << 14, 1 << 14, pack_imm(cycle, cycle, 1)]
            peer.tell("write", rows=rows)
            assert await soon(done) == 4
            assert (await peer.answer())["error"] is None
            await soon(side.port.close())
            await peer.ask("close")
            if cycle == 4:  # the first cycles open what is opened once
                before = _descriptors()
        assert _descriptors() == before
        handles = native_handles()
        assert handles.pop("fabrics") == 1
        assert not any(handles.values())
        assert not any({**await peer.ask("handles"), "fabrics": 0}.values())


# ---- processes ----


def _refusals_in_a_fork(uses: list[Callable[[], object]]) -> int:
    """How many of `uses` are refused for the fork, in a fork."""
    child = os.fork()
    if child == 0:
        refused = 0
        for use in uses:
            try:
                use()
            except FabricError as error:
                refused += "fork" in str(error)
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
async def test_a_fork_may_not_use_or_close_it(mode: str) -> None:
    async with local_side(mode, 4096) as side:
        await side.open()
        uses = [lambda: side.port.register(bytearray(8)), lambda: side.port.send(b"x"), side.fabric.close_now]
        assert _refusals_in_a_fork(uses) == len(uses)


async def test_our_descriptors_close_on_exec(mode: str) -> None:
    from pdserve.fabric._core import lib

    async with local_side(mode, 4096) as side:
        assert not os.get_inheritable(lib.pd_fabric_fd(side.fabric._native))


# ---- arguments ----


async def test_every_write_is_checked_before_any_is_posted(open_pair: OpenPair) -> None:
    side, peer = await open_pair(1 << 16)
    page = 4096
    last = (1 << 16) - page
    good = (0, 0, page, NO_IMM)
    cases: list[tuple[str, list[tuple[int, int, int, int]], dict[str, int]]] = [
        ("src_offset: row 1", [good, (last + 1, 0, page, NO_IMM)], {}),
        ("dst_offset: row 2", [good, good, (0, last + 1, page, NO_IMM)], {}),
        ("src_offset: row 0", [(2**63, 0, page, NO_IMM)], {}),
        ("src_shift 1", [(last, 0, page, NO_IMM)], {"src_shift": 1}),
        ("dst_shift", [(0, last, page, NO_IMM)], {"dst_shift": 2**64}),
        ("negative", [good], {"src_shift": -1}),
    ]
    for match, rows, shifts in cases:
        with pytest.raises(ValueError, match=match):
            side.port.write_pages(side.region, peer.remote, WriteTable.of(rows), **shifts)
    for match, arguments in (
        ("length", (0, 0, 0)),
        ("src_offset", (-1, 0, 1)),
        ("dst_offset", (0, 2**64, 1)),
        ("remote", (0, 1 << 16, 1)),
        ("region", (1 << 16, 0, 1)),
    ):
        src, dst, length = arguments
        with pytest.raises(ValueError, match=match):
            side.port.write(side.region, src, peer.remote, dst, length)
    with pytest.raises(ValueError, match="imm"):
        side.port.write(side.region, 0, peer.remote, 0, 1, imm=2**32)
    assert side.port.statistics()["writes_posted"] == 0
    empty = side.port.write_pages(side.region, peer.remote, WriteTable.of([]))
    assert empty.done
    assert await outcome(empty) is None
    assert await soon(outcome(side.port.write(side.region, last, peer.remote, last, page))) is None


async def test_messages_and_addresses_are_checked(open_pair: OpenPair) -> None:
    side, peer = await open_pair()
    limit = side.fabric.info.max_message
    for bad in (b"", b"x" * (limit + 1)):
        with pytest.raises(ValueError, match=f"outside 1..{limit}"):
            side.port.send(bad)
    with pytest.raises(FabricError, match="peer already"):
        side.port.connect(peer.address)
    port = await side.fabric.open_port(side.counters, on_message=lambda _: None, on_lost=lambda _: None)
    good = port.address
    for match, address in (
        ("bytes", good[:-1]),
        ("bytes", good + b"\0"),
        ("bytes", b""),
        ("family", b"\xff\xff" + good[2:]),
        ("port is 0", good[:2] + b"\0\0" + good[4:]),
    ):
        with pytest.raises(ValueError, match=match):
            port.connect(address)
    with pytest.raises(FabricError, match="no peer yet"):
        port.send(b"x")
    with pytest.raises(ValueError, match="empty"):
        port.register(bytearray())
    with pytest.raises(ValueError, match="key"):
        port.register(bytearray(8), key=2**64)
    with pytest.raises(ValueError, match="not an open region"):
        side.port.write(port.register(bytearray(8)), 0, peer.remote, 0, 1)
    await port.close()


async def test_a_region_stays_pinned_until_its_port_closes(mode: str) -> None:
    async with local_side(mode, 4096) as side:
        await side.open()
        side.region.close()
        side.region.close()
        with pytest.raises(BufferError):
            side.arena.close()
        await side.port.close()
        side.arena.close()


async def test_a_region_in_use_is_not_closed(open_pair: OpenPair) -> None:
    side, peer = await open_pair(8 << 20)
    batch = side.port.write(side.region, 0, peer.remote, 0, 8 << 20)
    with pytest.raises(FabricError, match="in flight"):
        side.region.close()
    assert await soon(outcome(batch)) is None
    side.region.close()
    with pytest.raises(ValueError, match="not an open region"):
        side.port.write(side.region, 0, peer.remote, 0, 1)


async def test_too_much_outstanding_is_refused(mode: str) -> None:
    async with remote_peer(mode, 4096) as peer, local_side(mode, 4096, max_outstanding=1024) as side:
        await side.join(peer)
        room = 1024 - side.fabric.statistics()["pump"]["outstanding"]
        batches = [side.port.write(side.region, 0, peer.remote, 0, 64) for _ in range(room)]
        with pytest.raises(FabricError) as caught:
            side.port.send(b"x")
        assert caught.value.name == "FI_ENOSPC"
        assert await soon(asyncio.gather(*map(outcome, batches))) == [None] * room
        await soon(side.port.send(b"x"))


@pytest.mark.parametrize(
    ("match", "settings"),
    [
        ("recv_size: 1 ", {"recv_size": 1}),
        ("recv_buffers: 0 ", {"recv_buffers": 0}),
        ("max_inflight_writes: 5000", {"max_inflight_writes": 5000}),
        ("mode: 'fast'", {"mode": "fast"}),
        ("refused", {"provider": "tcp;ofi_rxm"}),
        ("host", {"host": "0.0.0.0"}),
        ("cpu", {"cpu": -1}),
    ],
)
def test_settings_out_of_range_are_named(match: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=match):
        FabricConfig(**settings)


@pytest.mark.parametrize("settings", [{"provider": "nonesuch"}, {"host": "192.0.2.1"}])
def test_what_libfabric_does_not_offer_is_said(settings: dict[str, Any]) -> None:
    with pytest.raises(FabricError, match=r"nonesuch|192\.0\.2\.1") as caught:
        Fabric.open(FabricConfig(**settings))
    assert caught.value.name.startswith("FI_")


@pytest.mark.parametrize(
    ("field", "arguments"), [("key", (-1, 0, 1)), ("base", (0, 2**64, 1)), ("length", (0, 2**63, 2**63))]
)
def test_a_remote_region_is_checked(field: str, arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=field):
        RemoteRegion(*arguments)


async def test_an_unclosed_fabric_warns() -> None:
    fabric = Fabric.open(FabricConfig())
    with pytest.warns(ResourceWarning, match="never closed"):
        fabric.__del__()
    fabric.close_now()


def test_with_closes_without_a_loop() -> None:
    with Fabric.open(FabricConfig()) as fabric:
        assert fabric.info.provider == "tcp"
        assert fabric.info.mr_mode == 0
