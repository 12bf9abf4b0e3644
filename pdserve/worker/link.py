"""The node's side of a worker process: start it, feed it plans, hear its results, notice its end.

    WorkerProcess.start --spawn--> python -m pdserve.worker --fd N
        Init          -->
                      <--  LoadProgress ..., Ready + [arena, counter, eventfd]
        Plan, Plan    -->                      submit() never waits: what the socket refuses is kept in order
                      <--  StepResult          on_result, in step order
        Shutdown      -->                      stop()
                      <--  exit                pidfd; unasked for: on_exit, once

Everything happens in loop callbacks (add_reader, add_writer); there is no task and no thread. The worker ends
by itself when its socket ends or its parent dies, so a node that's killed leaves no orphan.

Who owns what. The link owns the process, its socket, its stderr and its pidfd and closes them when the process
has ended. The arena, the counter and the tick eventfd outlive the process: their users (fabric regions, a
loop's reader) have to let go first, then `stop` closes them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping

from pdserve.engine.plan import Plan, StepResult
from pdserve.errors import WorkerError
from pdserve.memory.arena import Arena, MemfdArena
from pdserve.memory.counter import NO_GATE, LayerCounter
from pdserve.worker.frames import MAX_FRAME, FrameDecoder, FrameError
from pdserve.worker.protocol import (
    READY_DESCRIPTORS,
    Fatal,
    Init,
    LoadProgress,
    Ready,
    Shutdown,
    ToWorker,
    decode_from_worker,
    encode,
)
from pdserve.worker.stderr import StderrPipe

MAX_UNSENT = 2 * MAX_FRAME
"""Bytes of plans kept for a worker that doesn't read. Beyond it the worker is taken for stalled and ended."""

_READ_SIZE = 1 << 16
_READS_PER_TURN = 16
_GRACE_S = 5.0
"""How long a worker may take to exit after it has said Fatal or closed its socket, before it's killed."""

_open: set[int] = set()


def open_links() -> int:
    """How many links of this process hold a process or descriptors; zero at the end of every test."""
    return len(_open)


class WorkerExited(WorkerError):
    """A worker process ended without being asked to. The message says how; the rest is for logs.

    `returncode` as subprocess has it (negative: the signal), `fatal` the worker's own last word if it had
    one, `stderr` its last lines.
    """

    def __init__(
        self,
        message: str,
        *,
        pid: int,
        returncode: int | None,
        fatal: Fatal | None = None,
        stderr: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.pid = pid
        self.returncode = returncode
        self.fatal = fatal
        self.stderr = stderr


class WorkerProcess:
    """One rank's process as its node sees it. Made by `start`; every method is called on that loop."""

    ready: Ready
    """The facts of the rank's arena and model."""
    arena: Arena
    """The rank's KV memory, mapped read-write here. Close every export (fabric regions) before `stop`."""
    counter: LayerCounter
    """The rank's layer counter."""
    tick_fd: int
    """Eventfd, nonblocking: readable after a tick of a plan with `send`. Remove its reader before `stop`."""

    @classmethod
    async def start(
        cls,
        init: Init,
        *,
        on_result: Callable[[StepResult], None],
        on_exit: Callable[[WorkerError], None],
        on_progress: Callable[[LoadProgress], None] | None = None,
        on_stderr: Callable[[str], None] | None = None,
        name: str = "rank0",
        env: Mapping[str, str] | None = None,
    ) -> WorkerProcess:
        """Start the rank of `init`; return when it's Ready (weights loaded, kernels warm).

        `on_result` gets each plan's result, in order. `on_exit` is called exactly once, with a WorkerExited,
        when the process has ended (been reaped) and `stop` was not called; not for a failure before this
        returns. `on_stderr` gets the worker's stderr by line; by default they go to this process's stderr
        after `[name] `. `env` is added to the worker's environment.

        Raises WorkerError where the worker can't be started or ends before Ready, saying why. There is no
        time limit: wrap it in `asyncio.timeout`. Cancelling kills the worker and closes everything.
        """
        link = cls(init, name, on_result, on_exit, on_progress, on_stderr)
        link._spawn(env)
        try:
            await link._became_ready
        except BaseException:
            link._stopping = True
            link._kill()
            await link._ended.wait()
            raise
        return link

    def submit(self, plan: Plan) -> None:
        """Send a plan. Never waits; plans arrive in the order of the calls.

        Raises WorkerError when the worker has ended or is stopping, or the plan is beyond the frame limit.
        """
        raise NotImplementedError

    async def stop(self, timeout: float = 5.0) -> None:
        """End the worker and close everything: Shutdown, at most `timeout` seconds, then SIGKILL.

        Plans submitted before are still executed within the time, but their results are not delivered, nor is
        `on_exit`. Also after the worker has ended by itself, to close arena, counter and `tick_fd`.
        Idempotent. Cancelling kills the worker. Raises BufferError while somebody uses the arena's buffer.
        """
        raise NotImplementedError
