"""Child processes as one: all start, all must live, all end. No child outlives the supervisor.

A child that ends without being told to ends the others, and `ChildFailed` says which it was and how it
ended. Each child leads a session of its own, so that Ctrl-C on the terminal reaches the supervisor alone,
which then stops the children in order. Should the supervisor itself be killed, the kernel kills the
children (`parent.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.cli.lines import LineSplitter
from pdserve.errors import PdserveError

_DRAIN_OUTPUT_S = 2.0
"""What is left in a dead child's pipe is read for so long: a grandchild may hold it open."""


class ChildFailed(PdserveError):
    """A child ended on its own, could not be started, or ended badly when told to."""

    code = "child_failed"


@dataclass(frozen=True, slots=True)
class Command:
    """A child to run. Children of a lower `stage` are stopped, and have ended, before those of a higher
    one.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    stage: int = 0


@dataclass(slots=True)
class Stop:
    """How the outside ends a supervisor: `gently` asks the children to end, `now` kills them."""

    gently: asyncio.Event = field(default_factory=asyncio.Event)
    now: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self) -> None:
        """A signal has arrived: the first one asks, the second one kills."""
        (self.now if self.gently.is_set() else self.gently).set()


class Child:
    """A running child process. Owned by `supervise`, which has waited for it when it returns."""

    def __init__(
        self,
        command: Command,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        pipe: asyncio.ReadTransport,
    ) -> None:
        self.command = command
        self.process = process
        self.ended = asyncio.Event()
        self._output = output
        self._pipe = pipe

    @classmethod
    async def start(cls, command: Command) -> Child:
        """Start it with its output on a pipe to us and nothing on its input.

        The pipe is ours and not asyncio's: `Process.wait` waits for the end of asyncio's pipes too, which a
        grandchild may hold open.
        """
        loop = asyncio.get_running_loop()
        read_end, write_end = os.pipe()
        output = asyncio.StreamReader()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(read_end, "rb", 0)
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=dict(command.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        except OSError as error:
            pipe.close()
            raise ChildFailed(f"{command.name} could not be started: {error}") from error
        finally:
            os.close(write_end)
        return cls(command, process, output, pipe)

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int:
        return self.process.pid

    async def follow(self, write: Callable[[str, str], None]) -> None:
        """Hand each line of output to `write(name, line)` until the child has ended and all was read.

        What it leaves behind in its session when it ends is killed.
        """
        reading = asyncio.create_task(self._read(write), name=f"{self.name} output")
        try:
            await self.process.wait()
            # At once: as long as a member of its session lives, and for long after, its pid names no other
            # process.
            self._kill_session()
            self.ended.set()
            await asyncio.wait([reading], timeout=_DRAIN_OUTPUT_S)
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            self._pipe.close()

    async def _read(self, write: Callable[[str, str], None]) -> None:
        lines = LineSplitter()
        while data := await self._output.read(1 << 16):
            for line in lines.feed(data):
                write(self.name, line)
        for line in lines.end():
            write(self.name, line)

    def how_it_ended(self) -> str:
        code = self.process.returncode
        assert code is not None
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code}"

    def terminate(self) -> None:
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()

    def kill(self) -> None:
        """Kill it and all of its session that did not leave it."""
        if not self.ended.is_set():
            self._kill_session()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


async def supervise(
    commands: Sequence[Command],
    *,
    stop: Stop,
    shutdown_timeout: float,
    write: Callable[[str, str], None],
    started: Callable[[Sequence[Child]], Awaitable[None]],
) -> None:
    """Run `commands` until `stop`, then end them. On return and on any exception all have ended.

    `started` is awaited once all processes exist; it may take as long as they need to become ready, and is
    cancelled by a stop. `write(name, line)` gets their output. `shutdown_timeout`: seconds that each stage
    gets after SIGTERM before SIGKILL. Raises `ChildFailed` if a child ends unasked or with a status other
    than 0, and what `started` raises.
    """
    children: list[Child] = []
    async with asyncio.TaskGroup() as outputs:
        try:
            for command in commands:
                child = await Child.start(command)
                children.append(child)
                outputs.create_task(child.follow(write), name=f"{child.name} follow")
            await _until_stopped(children, stop, started)
        except BaseException:
            # Nothing more is to be gained by patience: one of them is gone, and the rest cannot serve.
            await _end(children, stop, min(shutdown_timeout, 5.0))
            raise
        await _end(children, stop, shutdown_timeout)
    if not stop.now.is_set():
        for child in children:
            # Killed by the very SIGTERM: it had not got as far as handling it.
            if child.process.returncode not in (0, -signal.SIGTERM):
                raise ChildFailed(f"{child.name} {child.how_it_ended()} when it was told to stop")


async def _until_stopped(
    children: Sequence[Child], stop: Stop, started: Callable[[Sequence[Child]], Awaitable[None]]
) -> None:
    async def watch(child: Child) -> None:
        await child.ended.wait()
        raise ChildFailed(f"{child.name} {child.how_it_ended()}")

    async def announce() -> None:
        await started(children)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(watch(child), name=f"{child.name} watch") for child in children]
        tasks.append(group.create_task(announce(), name="started"))
        await stop.gently.wait()
        for task in tasks:
            task.cancel()


async def _end(children: Sequence[Child], stop: Stop, timeout: float) -> None:
    """SIGTERM by stages, then SIGKILL; returns when every child has ended and been waited for."""
    for stage in sorted({child.command.stage for child in children}):
        mine = [child for child in children if child.command.stage == stage]
        for child in mine:
            child.terminate()
        await _ended_or_now(mine, stop, timeout)
        for child in mine:
            child.kill()
    for child in children:
        await child.ended.wait()


async def _ended_or_now(children: Sequence[Child], stop: Stop, timeout: float) -> None:
    async def all_ended() -> None:
        for child in children:
            await child.ended.wait()

    waits = [
        asyncio.create_task(all_ended(), name="children end"),
        asyncio.create_task(stop.now.wait(), name="second signal"),
    ]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)
