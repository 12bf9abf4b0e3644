"""The node's link, against processes that follow the protocol and processes that break it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.plan import NewSequence, Plan, StepResult
from pdserve.errors import WorkerError
from pdserve.memory.arena import open_arenas
from pdserve.worker import link as link_module
from pdserve.worker.exit import WorkerExited
from pdserve.worker.link import WorkerProcess, open_links
from pdserve.worker.protocol import Init, LoadProgress

PEER = Path(__file__).with_name("peer.py")
INIT = Init(model_dir="/none", max_model_len=128, gate=True)


class Node:
    """What a node does with its callbacks: remember them, and wake whoever waits."""

    def __init__(self) -> None:
        self.results: list[int] = []
        self.exits: list[WorkerError] = []
        self.progress: list[LoadProgress] = []
        self.stderr: list[str] = []
        self._changed = asyncio.Event()

    def on_result(self, result: StepResult) -> None:
        self.results.append(result.step)
        self._changed.set()

    def on_exit(self, error: WorkerError) -> None:
        self.exits.append(error)
        self._changed.set()

    async def until(self, *, results: int = 0, exits: int = 0) -> None:
        async with asyncio.timeout(30):
            while len(self.results) < results or len(self.exits) < exits:
                self._changed.clear()
                await self._changed.wait()

    async def start(self, scenario: str, **changes: Any) -> WorkerProcess:
        arguments: dict[str, Any] = {
            "on_result": self.on_result,
            "on_exit": self.on_exit,
            "on_progress": self.progress.append,
            "on_stderr": self.stderr.append,
            "command": [sys.executable, str(PEER), scenario],
        }
        async with asyncio.timeout(30):
            return await WorkerProcess.start(INIT, **(arguments | changes))


def plan(step: int, tokens: int = 0) -> Plan:
    new = [NewSequence(step, [70_000] * tokens, tokens, [], None)] if tokens else []
    return Plan(step, new, [], [], [])


def held() -> tuple[int, int, int]:
    return len(os.listdir("/proc/self/fd")), open_arenas(), open_links()


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    before = open_arenas(), open_links()
    yield
    assert (open_arenas(), open_links()) == before


async def test_start_submit_stop() -> None:
    node, before = Node(), held()
    link = await node.start("serve")
    assert node.progress == [LoadProgress(1, 2), LoadProgress(2, 2)]
    assert link.ready.pid == link.pid
    assert link.arena.length == link.ready.arena_bytes
    for fd in (link.arena.fileno(), link.counter.fileno(), link.tick_fd):
        assert not os.get_inheritable(fd)
    link.submit(plan(0))
    await node.until(results=1)
    link.submit(plan(1))
    link.submit(plan(2))
    await node.until(results=3)
    assert node.results == [0, 1, 2]
    assert (link.counter.value, link.arena.buffer[0]) == (3, 2)
    assert link.statistics() == {"submitted": 3, "in_flight": 0, "unsent_bytes": 0}
    await link.stop()
    await link.stop()
    assert node.exits == []
    assert held() == before
    with pytest.raises(WorkerError, match="takes no plans: it is ended"):
        link.submit(plan(3))


async def test_submit_never_waits_and_keeps_the_order() -> None:
    node = Node()
    link = await node.start("no_reader")
    for step in range(40):
        link.submit(plan(step, tokens=step % 5 * 20_000))
    waiting = link.statistics()
    assert waiting["in_flight"] == 40
    assert waiting["unsent_bytes"] > 1 << 20
    link.counter.hold_at = 0
    await node.until(results=40)
    assert node.results == list(range(40))
    assert link.statistics()["unsent_bytes"] == 0
    await link.stop()


async def test_a_worker_that_does_not_read_is_ended_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_UNSENT", 1 << 20)
    node = Node()
    link = await node.start("no_reader")

    def submit_for_ever() -> None:
        for step in count():
            link.submit(plan(step, tokens=20_000))

    with pytest.raises(WorkerError, match="unread, the limit is 1048576"):
        submit_for_ever()
    assert node.exits == []
    await node.until(exits=1)
    assert "bytes of plans unread" in node.exits[0].message
    await link.stop()


async def test_a_plan_beyond_the_frame_limit_is_refused_alone() -> None:
    node = Node()
    link = await node.start("serve")
    with pytest.raises(WorkerError, match="longer than the limit of 67108864"):
        link.submit(plan(0, tokens=(64 << 20) // 5 + 1))
    link.submit(plan(0))
    await node.until(results=1)
    await link.stop()


async def test_results_may_come_in_pieces() -> None:
    node = Node()
    link = await node.start("bytewise")
    for step in range(5):
        link.submit(plan(step))
    await node.until(results=5)
    assert node.results == [0, 1, 2, 3, 4]
    await link.stop()


@pytest.mark.parametrize("exit_first", [False, True])
async def test_results_sent_before_a_death_are_delivered_before_it(exit_first: bool) -> None:
    node = Node()
    link = await node.start("talk_then_die")
    for step in range(6):
        link.submit(plan(step))
    if exit_first:  # the loop may hear of the exit before it has read the socket
        os.waitid(os.P_PID, link.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        link._exited()
    await node.until(exits=1)
    assert node.results == [0, 1, 2]
    await link.stop()


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ("fatal", r"worker rank0 \(pid \d+\): step 0: the sums do not add up$"),
        ("abort", r"was killed by SIGABRT"),
        ("talk_then_die", r"was killed by SIGKILL"),
        ("garbage", r"was ended: not a message of a worker"),
        ("oversize", r"was ended: a frame of 2147483647 bytes is longer than the limit"),
        ("not_asked", r"was ended: a result of step 77"),
    ],
)
async def test_an_end_is_told_once_and_says_why(scenario: str, says: str) -> None:
    node, before = Node(), held()
    link = await node.start(scenario)
    for step in range(3):
        link.submit(plan(step))
    await node.until(exits=1)
    files, _, links = held()
    assert (files - before[0], links - before[2]) == (5, 1)  # two maps (two files each) and the eventfd
    assert link.arena.buffer[0] == 0
    await link.stop()
    [error] = node.exits
    assert isinstance(error, WorkerExited)
    assert error.retryable
    assert re.search(says, error.message)
    assert held() == before


async def test_fatal_carries_its_code() -> None:
    node = Node()
    link = await node.start("fatal")
    link.submit(plan(0))
    await node.until(exits=1)
    [error] = node.exits
    assert (error.code, error.status) == ("step_failed", 500)
    await link.stop()


@pytest.mark.parametrize("scenario", ["fatal_and_stay", "hang_up"])
async def test_a_worker_that_should_have_gone_is_killed(
    scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_GRACE_S", 0.05)
    node = Node()
    link = await node.start(scenario)
    link.submit(plan(0))
    await node.until(exits=1)
    [error] = node.exits
    assert "stuck in the driver" in str(error) or "did not exit within 0.05 s" in str(error)
    await link.stop()


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ("fatal_at_start", r"config\.json is missing"),
        ("exit_3", r"exited with status 3; its last words: line 28 \| line 29 \| no newline"),
        ("garbage_at_start", r"was ended: a frame of \d+ bytes"),
        ("two_descriptors", r"Ready with 2 descriptors, expected 3"),
        ("four_descriptors", r"more than 3 descriptors"),
        ("wrong_size", r"has 32768 bytes, expected 65536"),
        ("wrong_sum", r"does not fit its pages"),
    ],
)
async def test_a_failed_start_raises_and_keeps_nothing(scenario: str, says: str) -> None:
    node, before = Node(), held()
    with pytest.raises(WorkerError, match=says):
        await node.start(scenario)
    assert node.exits == []
    assert held() == before


@pytest.mark.parametrize(
    ("scenario", "says"),
    [("ready_twice", r"was ended: .*more than 3|second Ready"), ("ready_and_die", "SIGKILL")],
)
async def test_an_end_right_after_ready_is_told_by_start_or_after_it(scenario: str, says: str) -> None:
    node, before = Node(), held()
    try:
        link = await node.start(scenario)
    except WorkerExited as error:
        node.on_exit(error)
    else:
        await node.until(exits=1)
        await link.stop()
    [told] = node.exits
    assert re.search(says, told.message)
    assert held() == before


async def test_stderr_comes_by_line() -> None:
    node = Node()
    with pytest.raises(WorkerExited) as caught:
        await node.start("exit_3")
    assert node.stderr == ["on stdout", *(f"line {number}" for number in range(30)), "no newline"]
    assert caught.value.stderr == tuple(node.stderr[-20:])


async def test_a_program_that_is_not_there() -> None:
    node, before = Node(), held()
    with pytest.raises(WorkerError, match=r"cannot start worker rank0 \(/no/such/program\)"):
        await node.start("serve", command=["/no/such/program"])
    assert held() == before


async def test_cancelling_a_start_kills_the_worker() -> None:
    node, before = Node(), held()
    loading = asyncio.Event()
    async with asyncio.timeout(30):
        starting = asyncio.ensure_future(node.start("deaf_at_start", on_stderr=lambda line: loading.set()))
        await loading.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert node.exits == []
    assert held() == before


async def test_stop_kills_a_worker_that_does_not_listen() -> None:
    node, before = Node(), held()
    link = await node.start("deaf")
    await link.stop(timeout=0.05)
    assert node.exits == []
    assert held() == before


async def test_cancelling_a_stop_kills_the_worker() -> None:
    node = Node()
    link = await node.start("deaf")
    pidfd = os.pidfd_open(link.pid)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, ended.set)
    stopping = asyncio.ensure_future(link.stop(timeout=60))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    async with asyncio.timeout(30):
        await ended.wait()
    loop.remove_reader(pidfd)
    os.close(pidfd)
    await link.stop()
    assert node.exits == []


async def test_two_stops_at_once() -> None:
    node = Node()
    link = await node.start("serve")
    await asyncio.gather(link.stop(), link.stop())
    assert node.exits == []


async def test_stop_lets_submitted_plans_run_and_tells_nobody() -> None:
    node = Node()
    link = await node.start("serve")
    watch = os.dup(link.counter.fileno())
    for step in range(10):
        link.submit(plan(step))
    await link.stop()
    assert int.from_bytes(os.pread(watch, 8, 0), "little") == 10
    os.close(watch)
    assert node.results == []


async def test_stop_opens_the_gate() -> None:
    node = Node()
    link = await node.start("gated")
    link.counter.hold_at = 1
    link.submit(plan(0))
    watch = os.dup(link.counter.fileno())
    await link.stop(timeout=60)
    assert int.from_bytes(os.pread(watch, 8, 0), "little") == 2
    os.close(watch)


async def test_the_arena_outlives_the_process_until_its_users_let_go() -> None:
    node = Node()
    link = await node.start("serve")
    user = link.arena.buffer[:100]
    os.kill(link.pid, signal.SIGKILL)
    await node.until(exits=1)
    with pytest.raises(BufferError, match="still in use"):
        await link.stop()
    assert open_links() == 1
    user[0] = 1
    user.release()
    await link.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_signal_is_named(number: signal.Signals) -> None:
    node = Node()
    link = await node.start("serve", name="rank7")
    os.kill(link.pid, number)
    await node.until(exits=1)
    assert f"worker rank7 (pid {link.pid}) was killed by {number.name}" in node.exits[0].message
    await link.stop()


async def test_a_callback_that_raises_loses_nothing() -> None:
    node = Node()
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    def on_result(result: StepResult) -> None:
        node.on_result(result)
        raise RuntimeError("a bug of the node")

    link = await node.start("serve", on_result=on_result)
    for step in range(3):
        link.submit(plan(step))
    await node.until(results=3)
    assert [str(context["exception"]) for context in told] == ["a bug of the node"] * 3
    await link.stop()


async def test_a_broken_stderr_reader_does_not_hide_the_end() -> None:
    node = Node()
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    def on_stderr(line: str) -> None:
        raise BrokenPipeError(line)

    with pytest.raises(WorkerExited, match="exited with status 3"):
        await node.start("exit_3", on_stderr=on_stderr)
    assert len(told) == 32


async def test_the_environment_is_the_one_given() -> None:
    node = Node()
    script = "import os, sys; sys.exit(os.environ['EXTRA'] + ' ' + str('HOME' in os.environ))"
    with pytest.raises(WorkerExited, match="status 1; its last words: yes False"):
        await node.start("", command=[sys.executable, "-c", script], env={"EXTRA": "yes"})
