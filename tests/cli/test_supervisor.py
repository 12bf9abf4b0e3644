"""The supervisor with real child processes: all live, or all end with one clear cause; none is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

import psutil
import pytest

from pdserve.cli.main import clear_cause
from pdserve.cli.supervisor import Child, ChildFailed, Command, Stop, supervise

Started = Callable[[Sequence[Child]], Awaitable[None]]

WAITS = "print('up', flush=True); import signal; signal.pause()"
DRAINS = """
import signal, sys
def drain(number, frame):
    print('drained', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
print('up', flush=True)
signal.pause()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
while True:
    signal.pause()
"""
WITH_GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])
print('grandchild', child.pid, flush=True)
import signal; signal.pause()
"""


class Run:
    """One supervised run: its output, and what each line of it sets off."""

    def __init__(self) -> None:
        self.stop = Stop()
        self.lines: list[tuple[str, str]] = []
        self.children: list[Child] = []
        self._watched: dict[tuple[str, str], asyncio.Event] = {}

    def write(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        for (wanted, start), event in self._watched.items():
            if name == wanted and line.startswith(start):
                event.set()

    async def line(self, name: str, start: str) -> str:
        event = self._watched.setdefault((name, start), asyncio.Event())
        if not any(who == name and line.startswith(start) for who, line in self.lines):
            await event.wait()
        return next(line for who, line in self.lines if who == name and line.startswith(start))

    async def __call__(
        self, *programs: tuple[str, str] | tuple[str, str, int], then: Started, timeout: float = 60.0
    ) -> None:
        commands = [
            Command(name, [sys.executable, "-c", source], dict(os.environ), *rest)
            for name, source, *rest in programs
        ]

        async def started(children: Sequence[Child]) -> None:
            self.children = list(children)
            await then(children)

        await supervise(commands, stop=self.stop, shutdown_timeout=timeout, write=self.write, started=started)

    async def failure(self, *programs: tuple[str, str] | tuple[str, str, int], then: Started) -> str:
        with pytest.raises(BaseExceptionGroup) as caught:
            await self(*programs, then=then)
        cause = clear_cause(caught.value)
        assert isinstance(cause, ChildFailed)
        return cause.message

    def all_ended(self) -> bool:
        return all(child.process.returncode is not None for child in self.children)


async def forever(children: Sequence[Child]) -> None:
    await asyncio.Event().wait()


async def test_stop_lets_all_drain() -> None:
    run = Run()

    async def then(children: Sequence[Child]) -> None:
        await run.line("a", "up")
        await run.line("b", "up")
        run.stop()

    await run(("a", DRAINS), ("b", DRAINS), then=then)
    assert sorted(run.lines) == [("a", "drained"), ("a", "up"), ("b", "drained"), ("b", "up")]
    assert [child.process.returncode for child in run.children] == [0, 0]


async def test_stages_end_in_order() -> None:
    run = Run()

    async def then(children: Sequence[Child]) -> None:
        for name in ("late", "early"):
            await run.line(name, "up")
        run.stop()

    await run(("late", DRAINS, 1), ("early", DRAINS, 0), then=then)
    assert [name for name, line in run.lines if line == "drained"] == ["early", "late"]


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("import sys; sys.exit(3)", "a ended with exit status 3"),
        ("pass", "a ended with exit status 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "a was killed by SIGKILL"),
    ],
)
async def test_a_child_that_ends_unasked_ends_all(source: str, how: str) -> None:
    run = Run()
    assert await run.failure(("a", source), ("b", WAITS), then=forever) == how
    assert run.all_ended()


async def test_its_last_words_are_heard() -> None:
    run = Run()
    await run.failure(("a", "import sys; sys.stderr.write('no such model'); sys.exit(1)"), then=forever)
    assert run.lines == [("a", "no such model")]


async def test_a_program_that_cannot_be_started() -> None:
    run = Run()
    commands = [
        Command("good", [sys.executable, "-c", WAITS], dict(os.environ)),
        Command("bad", ["/nonexistent/program"], {}),
    ]
    with pytest.raises(BaseExceptionGroup) as caught:
        await supervise(commands, stop=run.stop, shutdown_timeout=60, write=run.write, started=forever)
    assert "bad could not be started" in str(clear_cause(caught.value))


async def test_a_second_signal_kills_at_once() -> None:
    run = Run()

    async def then(children: Sequence[Child]) -> None:
        await run.line("a", "up")
        run.stop()
        run.stop()

    await run(("a", STUBBORN), then=then, timeout=3600)
    assert run.children[0].process.returncode == -signal.SIGKILL


async def test_who_does_not_end_in_time_is_killed_and_named() -> None:
    run = Run()

    async def then(children: Sequence[Child]) -> None:
        await run.line("a", "up")
        run.stop()

    with pytest.raises(ChildFailed, match="a was killed by SIGKILL when it was told to stop"):
        await run(("a", STUBBORN), then=then, timeout=0.05)


async def test_an_error_of_started_ends_all() -> None:
    run = Run()

    async def then(children: Sequence[Child]) -> None:
        raise ChildFailed("not ready")

    assert await run.failure(("a", WAITS), then=then) == "not ready"
    assert run.all_ended()


async def test_a_stop_while_starting_is_heeded() -> None:
    run = Run()
    run.stop()
    await asyncio.wait_for(run(("a", DRAINS), then=forever, timeout=60), 60)


@pytest.mark.parametrize("signals", [1, 2])
async def test_what_a_child_leaves_in_its_session_is_killed(signals: int) -> None:
    run = Run()
    grandchild = 0

    async def then(children: Sequence[Child]) -> None:
        nonlocal grandchild
        grandchild = int((await run.line("a", "grandchild")).split()[1])
        for _ in range(signals):
            run.stop()

    await run(("a", WITH_GRANDCHILD), then=then)
    assert await gone(grandchild)


async def test_a_grandchild_that_holds_the_pipe_holds_up_nobody() -> None:
    run = Run()
    source = WITH_GRANDCHILD.replace("pause()'])", "pause()'], start_new_session=True)")
    source = source.replace("import signal; signal.pause()\n", "sys.exit(1)\n")
    assert await run.failure(("a", source), then=forever) == "a ended with exit status 1"
    os.kill(int((await run.line("a", "grandchild")).split()[1]), signal.SIGKILL)


async def test_a_killed_supervisor_leaves_no_child() -> None:
    child = """
import os, signal
from pdserve.cli.parent import die_with_parent
die_with_parent(int(os.environ["P"]))
print(os.getpid(), flush=True)
signal.pause()
"""
    supervisor = f"""
import asyncio, os, sys
from pdserve.cli.supervisor import Command, Stop, supervise
child = {child!r}
async def started(children):
    await asyncio.Event().wait()
asyncio.run(supervise(
    [Command("a", [sys.executable, "-c", child], dict(os.environ, P=str(os.getpid())))],
    stop=Stop(), shutdown_timeout=60, write=lambda name, line: print(line, flush=True), started=started,
))
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", supervisor, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    orphan = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    assert await gone(orphan)


async def gone(pid: int) -> bool:
    """Whether a process that is not our child ends, asked of the kernel by a pidfd."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), 30)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
