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

Who owns what. The link owns the process, its socket, its stderr and its pidfd, and closes them when the
process has ended. The arena, the counter and the tick eventfd outlive it: their users (fabric regions, a
loop's reader) have to let go first, then `stop` closes them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from pdserve.engine.plan import Plan, StepResult
from pdserve.errors import WorkerError
from pdserve.memory.arena import Arena, MemfdArena
from pdserve.memory.counter import NO_GATE, LayerCounter
from pdserve.worker.exit import WorkerExited
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
_ANCILLARY_SIZE = socket.CMSG_LEN(READY_DESCRIPTORS * array("i").itemsize)
_GRACE_S = 5.0
"""How long a worker may take to exit after it has said Fatal or closed its socket, before it's killed."""

_open: set[int] = set()
_T = TypeVar("_T")


def open_links() -> int:
    """How many links of this process hold a process or descriptors; zero at the end of every test."""
    return len(_open)


class State(Enum):
    """Where the worker is, and what its link holds."""

    LOADING = "loading"  # process, socket, stderr, pidfd
    READY = "ready"  # the same, and arena, counter, tick_fd
    ENDING = "ending"  # socket closed; waits for the exit
    ENDED = "ended"  # reaped; arena, counter, tick_fd until `stop`


_RUNNING = (State.LOADING, State.READY)


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
    pid: int

    def __init__(
        self,
        init: Init,
        name: str,
        on_result: Callable[[StepResult], None],
        on_exit: Callable[[WorkerError], None],
        on_progress: Callable[[LoadProgress], None],
        on_stderr: Callable[[str], None],
    ) -> None:
        """Use `start`."""
        self.name = name
        self.state = State.LOADING
        self._init = init
        self._on_result, self._on_exit, self._on_progress = on_result, on_exit, on_progress
        self._loop = asyncio.get_running_loop()
        self._became_ready: asyncio.Future[None] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._stderr = StderrPipe(lambda line: self._call(on_stderr, line))
        self._decoder = FrameDecoder()
        self._descriptors: list[int] = []
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._in_flight: deque[int] = deque()
        self._submitted = 0
        self._fatal: Fatal | None = None
        self._cause: str | None = None
        self._exit_error: WorkerExited
        self._started = False
        self._stopping = False
        self._released = False
        self._grace: asyncio.TimerHandle | None = None

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
        command: Sequence[str] = (sys.executable, "-m", "pdserve.worker"),
    ) -> WorkerProcess:
        """Start the rank of `init`; return when it's Ready (weights loaded, kernels warm).

        `on_result` gets each plan's result, in order. `on_exit` is called exactly once, with a WorkerExited,
        when the process has ended (been reaped) and `stop` was not called; not for a failure before this
        returns. `on_stderr` gets the worker's stderr by line; by default they go to this process's stderr
        after `[name] `. `env` is the worker's whole environment, None this process's; `command` gets
        `--fd N` appended.
        The worker dies with the thread that calls this (prctl(2), PR_SET_PDEATHSIG): the loop's own.

        Raises WorkerError where the worker can't be started or ends before Ready, saying why. There is no
        time limit: wrap it in `asyncio.timeout`. Cancelling kills the worker and closes everything.
        """
        link = cls(
            init,
            name,
            on_result,
            on_exit,
            on_progress or (lambda progress: None),
            on_stderr or (lambda line: print(f"[{name}] {line}", file=sys.stderr)),  # noqa: T201
        )
        link._spawn(command, env)
        try:
            link._send(init)
            await link._became_ready
            if link.state is not State.READY:  # it said Ready and died before we got here
                await link._ended.wait()
                raise link._exit_error
        except BaseException:
            link._stopping = True
            link._kill()
            try:
                await link._ended.wait()
            finally:
                link._release()
            raise
        link._started = True
        return link

    def submit(self, plan: Plan) -> None:
        """Send a plan. Never waits; plans arrive in the order of the calls.

        Raises WorkerError when the worker has ended or is stopping, when the plan is beyond the frame limit,
        or when the worker has left MAX_UNSENT bytes unread (it's ended then).
        """
        if self.state is not State.READY or self._stopping:
            raise WorkerError(
                f"worker {self.name} (pid {self.pid}) takes no plans: it is {self._condition()}"
            )
        self._send(plan)
        self._in_flight.append(plan.step)
        self._submitted += 1

    async def stop(self, timeout: float = 5.0) -> None:
        """End the worker and close everything: Shutdown, at most `timeout` seconds, then SIGKILL.

        Plans submitted before are still executed within the time, but their results are not delivered, nor is
        `on_exit`. Also after the worker has ended by itself, to close arena, counter and `tick_fd`.
        Idempotent. Cancelling kills the worker. Raises BufferError while somebody uses the arena's buffer.
        """
        if not self._stopping:
            self._stopping = True
            if self.state is State.READY:
                if self._init.gate:
                    self.counter.hold_at = NO_GATE
                self._send(Shutdown())
        try:
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        except TimeoutError:
            self._kill()
            await self._ended.wait()
        except asyncio.CancelledError:
            self._kill()
            raise
        finally:
            self._release()

    def statistics(self) -> dict[str, int]:
        """Plans submitted and without a result, and bytes the socket has not taken yet."""
        return {
            "submitted": self._submitted,
            "in_flight": len(self._in_flight),
            "unsent_bytes": self._unsent_bytes,
        }

    # The process

    def _spawn(self, command: Sequence[str], env: Mapping[str, str] | None) -> None:
        """Start the process, with one socket and nothing else inherited.

        A session of its own: Ctrl-C and a hang-up of the terminal reach the node alone, which then stops the
        worker in order.
        """
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, "--fd", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr.write_end,
                    stderr=self._stderr.write_end,
                    pass_fds=(theirs.fileno(),),
                    close_fds=True,
                    start_new_session=True,
                    env=env,
                )
            except OSError as error:
                self._socket.close()
                self._stderr.close()
                raise WorkerError(f"cannot start worker {self.name} ({command[0]}): {error}") from error
        self.pid = self._process.pid
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            self._socket.close()
            self._stderr.close()
            self._process.kill()
            self._process.wait()
            raise WorkerError(f"cannot watch worker {self.name} (pid {self.pid}): {error}") from error
        _open.add(id(self))
        self._stderr.reading(self._loop)
        self._loop.add_reader(self._pidfd, self._exited)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    def _kill(self) -> None:
        if self.state is not State.ENDED:
            self._process.kill()

    def _exited(self) -> None:
        """The pidfd is readable: the process has ended, and what it has written before is all there."""
        returncode = self._process.poll()
        if returncode is None:
            return
        while self.state in _RUNNING and self._read():
            pass
        self._end(None)
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._stderr.close()
        if self._grace is not None:
            self._grace.cancel()
        self.state = State.ENDED
        if self._released:
            _open.discard(id(self))
        self._ended.set()
        self._report(returncode)

    def _report(self, returncode: int) -> None:
        self._exit_error = WorkerExited(
            f"worker {self.name} (pid {self.pid})",
            returncode,
            cause=self._cause,
            fatal=self._fatal,
            stderr=self._stderr.last_lines,
        )
        if not self._became_ready.done():
            self._became_ready.set_exception(self._exit_error)
        elif self._started and not self._stopping:
            self._call(self._on_exit, self._exit_error)

    def _condition(self) -> str:
        if self.state is State.READY:
            return "stopping"
        return str(self.state.value)

    # The socket

    def _readable(self) -> None:
        for _ in range(_READS_PER_TURN):
            if not self._read():
                return

    def _read(self) -> bool:
        """Read once. False when there is nothing more for now, or for ever."""
        try:
            # Not socket.recv_fds: Python 3.11's loses the flag.
            data, ancillary, flags, _address = self._socket.recvmsg(
                _READ_SIZE, _ANCILLARY_SIZE, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data, ancillary, flags = b"", [], 0  # it ended with plans unread: the exit says why
        for level, kind, body in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array("i")
                descriptors.frombytes(body[: len(body) - len(body) % descriptors.itemsize])
                self._descriptors += descriptors
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > READY_DESCRIPTORS:
            self._end(f"it sent more than {READY_DESCRIPTORS} descriptors", kill=True)
        elif not data:
            self._end(None)
        else:
            self._take(data)
        return self.state in _RUNNING

    def _take(self, data: bytes) -> None:
        self._decoder.feed(data)
        try:
            while self.state in _RUNNING and (payload := self._decoder.pop()) is not None:
                self._receive(payload)
        except WorkerError as error:
            self._end(error.message, kill=True)

    def _receive(self, payload: bytes) -> None:
        match decode_from_worker(payload):
            case StepResult() as result:
                if not self._in_flight or self._in_flight[0] != result.step:
                    raise FrameError(f"a result of step {result.step}, which is not the next in flight")
                self._in_flight.popleft()
                if not self._stopping:
                    self._call(self._on_result, result)
            case LoadProgress() as progress:
                self._call(self._on_progress, progress)
            case Ready() as ready:
                self._attach(ready)
            case Fatal() as fatal:
                self._fatal = fatal
                self._end(None)

    def _attach(self, ready: Ready) -> None:
        """Map what came with Ready. Raises WorkerError where it isn't what Ready says."""
        if self.state is not State.LOADING:
            raise FrameError("a second Ready")
        if len(self._descriptors) != READY_DESCRIPTORS:
            raise FrameError(f"Ready with {len(self._descriptors)} descriptors, expected {READY_DESCRIPTORS}")
        if ready.arena_bytes != ready.layers * ready.num_pages * ready.page_bytes:
            raise FrameError(f"Ready: an arena of {ready.arena_bytes} bytes does not fit its pages")
        arena_fd, counter_fd, tick_fd = self._descriptors
        self._descriptors = [counter_fd, tick_fd]
        arena = MemfdArena.attach(arena_fd, ready.arena_bytes)
        self._descriptors = [tick_fd]
        try:
            self.counter = LayerCounter.attach(counter_fd)
        except BaseException:
            arena.close()
            raise
        self._descriptors = []
        self.arena, self.tick_fd, self.ready = arena, tick_fd, ready
        self.state = State.READY
        if not self._became_ready.done():
            self._became_ready.set_result(None)

    def _send(self, message: ToWorker) -> None:
        frame = encode(message)
        if self._unsent_bytes + len(frame) > MAX_UNSENT:
            cause = f"it left {self._unsent_bytes} bytes of plans unread, the limit is {MAX_UNSENT}"
            self._end(cause, kill=True)
            raise WorkerError(f"worker {self.name} (pid {self.pid}) was ended: {cause}")
        waiting = bool(self._unsent)
        self._unsent.append(memoryview(frame))
        self._unsent_bytes += len(frame)
        if not waiting:
            self._writable()
            if self._unsent:
                self._loop.add_writer(self._socket.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop_unsent()  # it has ended; what it said before is still to be read
        self._loop.remove_writer(self._socket.fileno())

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_bytes = 0

    def _end(self, cause: str | None, *, kill: bool = False) -> None:
        """Nothing more is said or heard: close the socket, which ends a worker that still runs."""
        self._cause = self._cause or cause
        self._drop_unsent()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors = []
        if self.state in _RUNNING:
            self.state = State.ENDING
            self._grace = self._loop.call_later(_GRACE_S, self._overdue)
        if kill:
            self._kill()

    def _overdue(self) -> None:
        self._cause = self._cause or f"it closed its socket and did not exit within {_GRACE_S:g} s"
        self._kill()

    def _release(self) -> None:
        """Close what the node mapped. Raises BufferError, and may be called again, while it's in use."""
        if self._released:
            return
        if hasattr(self, "ready"):
            self.arena.close()
            self.counter.close()
            os.close(self.tick_fd)
        self._released = True
        if self.state is State.ENDED:
            _open.discard(id(self))

    def _call(self, callback: Callable[[_T], None], value: _T) -> None:
        """A callback that raises is its owner's bug; it must not lose the messages behind this one."""
        try:
            callback(value)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": f"a callback of worker {self.name} raised", "exception": error}
            )
