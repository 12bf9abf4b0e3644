"""Two processes over tcp: what lands, when it is said to have landed, and in what size."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import numpy as np
import pytest

from pdserve.fabric import NO_IMM, WriteTable, pack_imm

from .conftest import OpenPair, soon

MAX_ARENA = 16 << 20


def pattern(seed: int, size: int) -> Any:
    """What the peer's `fill` command puts into its arena."""
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class Pages:
    """A random transfer: pages of one size from one table of places to another, some of them merged.

    `rows` are the writes, `copy` does the same to arrays, `runs` is what the immediates add up to.
    """

    def __init__(
        self, rng: random.Random, page: int, arena: int, slot: int, generation: int, merge: bool
    ) -> None:
        places = arena // page
        count = rng.randint(1, min(places // 2, 64))
        self.page = page
        self.src = rng.sample(range(places), count)
        self.dst = rng.sample(range(places), count)
        if merge:  # some stretches lie side by side in both tables
            for start in range(0, count - 4, 4):
                first_src, first_dst = rng.randrange(places - 4), rng.randrange(places - 4)
                self.src[start : start + 4] = range(first_src, first_src + 4)
                self.dst[start : start + 4] = range(first_dst, first_dst + 4)
        self.rows: list[int] = []
        index = 0
        while index < count:
            length = 1
            while merge and index + length < count and self._adjacent(index + length):
                length += 1
            imm = pack_imm(slot, generation, length)
            self.rows += [self.src[index] * page, self.dst[index] * page, length * page, imm]
            index += length
        self.runs = count
        self.places = places

    def _adjacent(self, index: int) -> bool:
        return self.src[index] == self.src[index - 1] + 1 and self.dst[index] == self.dst[index - 1] + 1

    def unambiguous(self) -> bool:
        """No destination is written twice: then the order of arrival can't matter."""
        return len(set(self.dst)) == len(self.dst)

    def equal(self, source: Any, arena: Any) -> bool:
        pages = arena.reshape(self.places, self.page)
        return bool((pages[self.dst] == source.reshape(self.places, self.page)[self.src]).all())

    def untouched(self, arena: Any) -> bool:
        mask = np.ones(self.places, bool)
        mask[self.dst] = False
        return not arena.reshape(self.places, self.page)[mask].any()


@pytest.mark.parametrize("merge", [False, True], ids=["single", "merged"])
async def test_pages_are_there_byte_for_byte_when_the_count_is(open_pair: OpenPair, merge: bool) -> None:
    side, peer = await open_pair(MAX_ARENA)
    await peer.ask("fill", seed=11)
    source = pattern(11, MAX_ARENA)
    arena = np.frombuffer(side.arena, np.uint8)
    rng = random.Random(f"pages {merge}")
    for generation, page in enumerate([2048, 3000 * 8, 4096, 16384, 65536, 262144, 2048, 65536]):
        page_arena = MAX_ARENA - MAX_ARENA % page
        transfer = Pages(rng, page, page_arena, 9, generation, merge)
        while not transfer.unambiguous():
            transfer = Pages(rng, page, page_arena, 9, generation, merge)
        arena[:] = 0
        verdict: asyncio.Future[tuple[bool, int]] = asyncio.get_running_loop().create_future()

        def check(
            slot: int,
            transfer: Pages = transfer,
            limit: int = page_arena,
            verdict: asyncio.Future[tuple[bool, int]] = verdict,
        ) -> None:
            equal = transfer.equal(source[:limit], arena[:limit])
            verdict.set_result((equal, side.counters.count(slot)))

        side.counters.arm(9, generation, transfer.runs, on_complete=check)
        peer.tell("write", rows=transfer.rows)
        assert await soon(verdict) == (True, transfer.runs)
        assert transfer.untouched(arena[:page_arena])
        assert (await peer.answer())["error"] is None
        assert side.counters.disarm(9) == transfer.runs
    assert side.counters.stale == 0


async def test_shifts_move_a_table_through_the_layers(open_pair: OpenPair) -> None:
    side, peer = await open_pair(1 << 20)
    await peer.ask("fill", seed=5)
    source = pattern(5, 1 << 20)
    layers, layer, page = 8, 1 << 17, 4096
    rows: list[int] = []
    for src, dst in ((0, 7), (3, 2), (5, 5)):
        rows += [src * page, dst * page, page, pack_imm(1, 1, 1)]
    done = side.arm(1, 1, 3 * layers)
    for number in range(layers):
        peer.tell("write", rows=rows, src_shift=number * layer, dst_shift=(layers - 1 - number) * layer)
    assert await soon(done) == 3 * layers
    arena = np.frombuffer(side.arena, np.uint8).reshape(layers, -1, page)
    sent = source.reshape(layers, -1, page)
    for number in range(layers):
        assert (arena[layers - 1 - number][[7, 2, 5]] == sent[number][[0, 3, 5]]).all()
    for _ in range(layers):
        assert (await peer.answer())["error"] is None


async def test_both_directions_at_once(open_pair: OpenPair) -> None:
    """Messages and writes cross on one pair of ports."""
    side, peer = await open_pair(1 << 20)
    await peer.ask("fill", seed=3)
    half = 1 << 19
    side.arena[:half] = os.urandom(half)
    done = side.arm(2, 0, 8)
    step = half // 8
    rows: list[int] = []
    for number in range(8):
        rows += [number * step, half + number * step, step, pack_imm(2, 0, 1)]
    peer.tell("write", rows=rows)
    batches = [side.port.write(side.region, n * step, peer.remote, half + n * step, step) for n in range(8)]
    sent = [side.port.send(f"message {n}".encode()) for n in range(100)]
    for batch in batches:
        await soon(_ended(batch))
    await soon(asyncio.gather(*sent))
    assert await soon(done) == 8
    assert side.arena[half:] == pattern(3, 1 << 20).tobytes()[:half]
    assert (await peer.answer())["error"] is None
    heard = [bytes.fromhex((await soon(peer.events.get()))["data"]) for _ in range(100)]
    assert heard == [f"message {n}".encode() for n in range(100)]


async def _ended(batch: Any) -> None:
    await batch


async def test_a_write_without_an_immediate_counts_nowhere(open_pair: OpenPair) -> None:
    side, peer = await open_pair()
    await peer.ask("fill", seed=1)
    done = side.arm(0, 0, 1)
    await peer.ask("write", rows=[0, 0, 4096, NO_IMM, 4096, 4096, 4096, pack_imm(0, 0, 1)])
    assert await soon(done) == 1
    assert side.arena[4096:8192] == pattern(1, 1 << 20).tobytes()[4096:8192]
    assert side.port.statistics()["imms"] == 1


async def test_messages_up_to_the_largest(open_pair: OpenPair) -> None:
    side, peer = await open_pair()
    limit = side.fabric.info.max_message
    rng = random.Random(1)
    messages = [rng.randbytes(size) for size in (1, 2, 255, 4096, limit - 1, limit)]
    await peer.ask("send", messages=[message.hex() for message in messages])
    assert [await soon(side.messages.get()) for _ in messages] == messages
    for message in messages:
        side.port.send(message)
    for message in messages:
        assert (await soon(peer.events.get()))["data"] == message.hex()


async def test_many_messages_than_more_receive_buffers(open_pair: OpenPair) -> None:
    """Ten times as many as there are receive buffers, each way; none is lost, order is kept."""
    side, peer = await open_pair(recv_buffers=8)
    numbers = [n.to_bytes(4, "little") for n in range(500)]
    peer.tell("send", messages=[n.hex() for n in numbers])
    for n in numbers:
        side.port.send(n)
    assert [await soon(side.messages.get()) for _ in numbers] == numbers
    assert (await peer.answer())["errors"] == []
    assert [(await soon(peer.events.get()))["data"] for _ in numbers] == [n.hex() for n in numbers]


async def test_a_message_overtakes_queued_pages(open_pair: OpenPair) -> None:
    """A control message does not wait behind a thousand page writes of its own port."""
    side, peer = await open_pair(MAX_ARENA)
    table = WriteTable.of([(n * 65536, n * 65536, 65536, NO_IMM) for n in range(256)])
    order: list[str] = []
    batches = [side.port.write_pages(side.region, peer.remote, table) for _ in range(8)]
    batches[-1].add_done_callback(lambda _: order.append("pages"))
    sent = side.port.send(b"cancel")
    sent.add_done_callback(lambda _: order.append("message"))
    await soon(_ended(batches[-1]))
    await soon(sent)
    assert (await soon(peer.events.get()))["data"] == b"cancel".hex()
    assert order == ["message", "pages"]


async def test_ipv6(open_pair: OpenPair) -> None:
    side, peer = await open_pair(host="::1")
    await peer.ask("fill", seed=8)
    done = side.arm(4, 4, 1)
    await peer.ask("write", rows=[0, 8192, 8192, pack_imm(4, 4, 1)])
    assert await soon(done) == 1
    assert side.arena[8192:16384] == pattern(8, 1 << 20).tobytes()[:8192]


async def test_statistics_add_up(open_pair: OpenPair) -> None:
    side, peer = await open_pair()
    await soon(side.port.send(b"x"))
    await soon(_ended(side.port.write(side.region, 0, peer.remote, 0, 4096)))
    statistics = side.port.statistics()
    assert statistics["provider"] == "tcp"
    assert statistics["connected"] is True
    assert statistics["lost"] is None
    assert (statistics["writes_posted"], statistics["writes_completed"]) == (1, 1)
    assert statistics["bytes_posted"] == 4096
    assert (statistics["sends_posted"], statistics["sends_completed"]) == (1, 1)
    for gauge in ("queued_batches", "queued_sends", "inflight_writes", "inflight_sends", "operations"):
        assert statistics[gauge] == 0
    assert side.fabric.statistics()["provider"] == "tcp"
    assert side.fabric.statistics()["handles"]["endpoints"] == 1


async def test_no_wake_up_is_lost(open_pair: OpenPair) -> None:
    """Round trips with nothing else going on: one lost wake-up and it hangs."""
    side, peer = await open_pair()
    for number in range(300):
        message = number.to_bytes(8, "little")
        side.port.send(message)
        assert (await soon(peer.events.get()))["data"] == message.hex()
        if number % 3 == 0:
            done = side.arm(7, number, 1)
            peer.tell("write", rows=[0, 0, 64 + number, pack_imm(7, number, 1)])
            assert await soon(done) == 1
            side.counters.disarm(7)
            assert (await peer.answer())["error"] is None
