"""The rank process itself, on a tiny random Llama checkpoint: steps, ticks, gate, and every way to end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from pdserve.engine.plan import MorePages, NewSequence, Plan, StepResult, Work
from pdserve.engine.sampling import SamplingParams
from pdserve.errors import WorkerError
from pdserve.memory.arena import open_arenas
from pdserve.memory.counter import NO_GATE
from pdserve.worker.link import WorkerProcess, open_links
from pdserve.worker.protocol import Init

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

LAYERS, KV_HEADS, HEAD_DIM, PAGE_SIZE, NUM_PAGES = 3, 2, 16, 16, 64
PAGE_BYTES = KV_HEADS * 2 * PAGE_SIZE * HEAD_DIM * 4
TICKS = LAYERS + 1
GREEDY = SamplingParams(temperature=0.0, seed=1)


class Rank:
    """A worker and what it told its node. Step numbers, sequence ids and pages are handed out in order."""

    def __init__(self) -> None:
        self.link: WorkerProcess
        self.results: list[StepResult] = []
        self.exits: list[WorkerError] = []
        self.loaded: list[float] = []
        self.steps = 0
        self.pages = iter(range(1, NUM_PAGES))
        self.sequences = iter(range(1, 1 << 20))
        self._changed = asyncio.Event()

    def changed(self, _: object = None) -> None:
        self._changed.set()

    def on_result(self, result: StepResult) -> None:
        self.results.append(result)
        self.changed()

    def on_exit(self, error: WorkerError) -> None:
        self.exits.append(error)
        self.changed()

    def submit(self, **fields: Any) -> int:
        """Submit the next step; returns its number."""
        empty: dict[str, Any] = {"new": [], "pages": [], "finished": [], "work": []}
        self.link.submit(Plan(step=self.steps, **(empty | fields)))
        self.steps += 1
        return self.steps - 1

    async def until_done(self) -> list[StepResult]:
        async with asyncio.timeout(60):
            while len(self.results) < self.steps and not self.exits:
                self._changed.clear()
                await self._changed.wait()
        return self.results

    async def until_exit(self) -> WorkerError:
        async with asyncio.timeout(60):
            while not self.exits:
                self._changed.clear()
                await self._changed.wait()
        [error] = self.exits
        return error

    async def until_held(self, value: int) -> None:
        """Until the counter is at `value`, woken by the eventfd alone."""
        ticked = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self.link.tick_fd, ticked.set)
        try:
            async with asyncio.timeout(60):
                while self.link.counter.value < value:
                    await ticked.wait()
                    ticked.clear()
                    self.pokes()
        finally:
            loop.remove_reader(self.link.tick_fd)
        assert self.link.counter.value == value

    def pokes(self) -> int:
        try:
            return os.eventfd_read(self.link.tick_fd)
        except BlockingIOError:
            return 0

    def written(self, page: int) -> list[bool]:
        """Of each layer: does the page hold anything?"""
        cache = np.frombuffer(self.link.arena.buffer, np.uint8).reshape(LAYERS, NUM_PAGES, PAGE_BYTES)
        return [bool(cache[layer, page].any()) for layer in range(LAYERS)]

    def new(self, tokens: list[int], sampling: SamplingParams | None = GREEDY) -> tuple[NewSequence, Work]:
        """A sequence with one page, and the work of its whole prompt."""
        seq = next(self.sequences)
        sequence = NewSequence(seq, tokens, len(tokens), [next(self.pages)], sampling)
        return sequence, Work(seq, 0, len(tokens), sampling is not None)


@asynccontextmanager
async def running(init: Init, **changes: Any) -> AsyncIterator[Rank]:
    rank = Rank()
    async with asyncio.timeout(90):
        rank.link = await WorkerProcess.start(
            msgspec.structs.replace(init, **changes),
            on_result=rank.on_result,
            on_exit=rank.on_exit,
            on_progress=lambda progress: rank.loaded.append(progress.loaded_bytes / progress.total_bytes),
        )
    try:
        yield rank
    finally:
        await rank.link.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rank(init: Init) -> AsyncIterator[Rank]:
    async with running(init) as rank:
        yield rank
        assert rank.exits == []


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


# One worker for all of these


async def test_ready_states_the_facts(rank: Rank) -> None:
    ready = rank.link.ready
    assert (ready.layers, ready.kv_heads, ready.head_dim, ready.vocab_size) == (
        LAYERS,
        KV_HEADS,
        HEAD_DIM,
        128,
    )
    assert (ready.num_pages, ready.page_size, ready.page_bytes) == (NUM_PAGES, PAGE_SIZE, PAGE_BYTES)
    assert (ready.dtype, ready.arena_bytes) == ("float32", LAYERS * NUM_PAGES * PAGE_BYTES)
    assert (ready.pid, rank.link.arena.length) == (rank.link.pid, ready.arena_bytes)
    assert rank.loaded == sorted(rank.loaded)
    assert rank.loaded[-1] == 1.0


async def test_the_arena_starts_zeroed_and_the_counter_at_zero(init: Init, rank: Rank) -> None:
    assert rank.link.counter.value == rank.steps * TICKS
    assert not any(rank.written(NUM_PAGES - 1))


async def generated(rank: Rank, tokens: list[int], *, overlapped: bool) -> list[int]:
    """The prompt and four decode steps, planned ahead of their results or one after the other."""
    sequence, work = rank.new(tokens)
    first = rank.submit(new=[sequence], work=[work])
    for step in range(4):
        if not overlapped:
            await rank.until_done()
        rank.submit(work=[Work(sequence.seq, len(tokens) + step, 1, True)])
    rank.submit(finished=[sequence.seq])
    results = await rank.until_done()
    return [output.token for result in results[first:] for output in result.outputs]


async def test_overlapped_steps_give_what_single_steps_give(rank: Rank) -> None:
    alone = await generated(rank, [5, 9, 77, 3], overlapped=False)
    ahead = await generated(rank, [5, 9, 77, 3], overlapped=True)
    assert len(alone) == 5
    assert ahead == alone
    assert [result.step for result in rank.results] == list(range(rank.steps))
    assert all(result.started_ns <= result.ended_ns for result in rank.results)


async def test_a_sequence_gains_pages(rank: Rank) -> None:
    sequence, _ = rank.new(list(range(17)), None)
    work = Work(sequence.seq, 0, 15, False)
    page = next(rank.pages)
    rank.submit(new=[sequence], work=[work])
    rank.submit(pages=[MorePages(sequence.seq, [page])])
    rank.submit(work=[Work(sequence.seq, 15, 2, False)])
    rank.submit(finished=[sequence.seq])
    await rank.until_done()
    assert all(rank.written(sequence.pages[0]))
    assert all(rank.written(page))


async def test_every_step_makes_its_ticks_and_only_a_sending_one_pokes(rank: Rank) -> None:
    await rank.until_done()
    rank.pokes()
    sequence, work = rank.new([1, 2, 3], None)
    rank.submit()
    rank.submit(new=[sequence], work=[work])
    rank.submit(finished=[sequence.seq])
    await rank.until_done()
    assert rank.link.counter.value == rank.steps * TICKS
    assert rank.pokes() == 0
    rank.submit(send=True)
    await rank.until_done()
    assert rank.link.counter.value == rank.steps * TICKS
    assert rank.pokes() == TICKS


@pytest.mark.parametrize("layer", range(TICKS))
async def test_the_gate_holds_the_step_exactly_after_a_layer(rank: Rank, layer: int) -> None:
    await rank.until_done()
    sequence, work = rank.new([3, 4, 5], None)
    hold_at = rank.steps * TICKS + layer + 1
    rank.link.counter.hold_at = hold_at
    rank.submit(new=[sequence], work=[work], send=True)
    rank.submit(finished=[sequence.seq])
    await rank.until_held(hold_at)
    assert rank.written(sequence.pages[0]) == [index <= layer for index in range(LAYERS)]
    rank.link.counter.hold_at = NO_GATE
    await rank.until_done()
    assert rank.link.counter.value == rank.steps * TICKS
    assert all(rank.written(sequence.pages[0]))


async def test_ctrl_c_is_the_nodes_business(rank: Rank) -> None:
    os.kill(rank.link.pid, signal.SIGINT)
    rank.submit()
    await rank.until_done()
    assert os.getsid(rank.link.pid) == rank.link.pid != os.getsid(0)


# A worker each


async def test_a_killed_rank_from_first_to_last(init: Init) -> None:
    """Pages from a budget; nothing inherited but its socket; no gate without `gate`; SIGKILL told once."""
    before = files(), open_arenas(), open_links()
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    pipe = os.readlink(f"/proc/self/fd/{writing}")
    budget = LAYERS * PAGE_BYTES * 10 + 5
    async with running(init, num_pages=0, kv_cache_memory_bytes=budget, gate=False) as rank:
        os.close(reading)
        os.close(writing)
        folder = f"/proc/{rank.link.pid}/fd"
        theirs = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
        assert pipe not in theirs
        assert sum(link.startswith("socket:") for link in theirs) == 1
        assert rank.link.ready.num_pages == 10
        rank.link.counter.hold_at = 1
        rank.submit()
        await rank.until_done()
        os.kill(rank.link.pid, signal.SIGKILL)
        error = await rank.until_exit()
        assert f"(pid {rank.link.pid}) was killed by SIGKILL" in error.message
    assert rank.exits == [error]
    assert (files(), open_arenas(), open_links()) == before


async def test_the_early_tick_is_early(init: Init) -> None:
    async with running(init, fault="early_tick") as rank:
        sequence, work = rank.new([3, 4, 5], None)
        rank.link.counter.hold_at = 2
        rank.submit(new=[sequence], work=[work], send=True)
        await rank.until_held(2)
        assert rank.written(sequence.pages[0]) == [True, False, False]
        rank.link.counter.hold_at = NO_GATE
        await rank.until_done()
        assert rank.link.counter.value == TICKS


async def test_a_plan_that_cannot_be_run_is_fatal_and_names_its_step(init: Init) -> None:
    async with running(init) as rank:
        rank.submit()
        rank.submit(work=[Work(4711, 0, 1, True)])
        rank.submit()
        error = await rank.until_exit()
        assert "step 1 (1 sequences) failed" in error.message
        assert "4711" in error.message
        assert (error.code, [result.step for result in rank.results]) == ("step_failed", [0])


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"model_dir": "/no/such/model"}, "bad_model", "/no/such/model"),
        ({"fault": "early_tick", "gate": False}, "bad_config", "refused without gate"),
        ({"fault": "cosmic_ray"}, "bad_config", "'cosmic_ray': expected one of early_tick"),
        ({"tp": 2}, "bad_config", "only tp 1"),
        ({"cpus": [4095]}, "bad_config", "cpus"),
        ({"threads": 0}, "bad_config", "threads is 0"),
    ],
)
async def test_a_start_that_cannot_be_is_refused_by_name(
    init: Init, changes: dict[str, Any], code: str, says: str
) -> None:
    before = files(), open_arenas(), open_links()
    with pytest.raises(WorkerError, match=says) as caught:
        async with running(init, **changes):
            pass
    assert caught.value.code == code
    assert (files(), open_arenas(), open_links()) == before
