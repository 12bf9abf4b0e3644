"""The rank process: load, say Ready, then a plan in and a result out until the node has no more.

Started by `link.WorkerProcess`, with one socket. It never outlives its node: the end of the stream ends the
loop, and the kernel kills it when its parent dies in the middle of a step (PR_SET_PDEATHSIG, prctl(2)).
SIGINT is the node's business alone; SIGTERM ends the process at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import time
import traceback

from pdserve.engine.plan import Plan, StepResult
from pdserve.errors import ConfigError, ModelError, PdserveError
from pdserve.memory.arena import MemfdArena
from pdserve.memory.counter import LayerCounter
from pdserve.models.card import load_card
from pdserve.worker.channel import Channel, NodeGone
from pdserve.worker.frames import FrameError
from pdserve.worker.protocol import FAULTS, Fatal, Init, LoadProgress, Ready, Shutdown
from pdserve.worker.ticks import LayerTicks

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PROGRESS_PARTS = 200


class StepFailed(PdserveError):
    """A plan could not be executed; the message names its step."""

    code = "step_failed"


def main(argv: list[str]) -> int:
    """Run the rank whose node holds the other end of `--fd`. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="pdserve.worker", description="A rank process; started by a node.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited Unix stream socket")
    fd: int = parser.parse_args(argv).fd
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=fd))
    try:
        channel.check()  # the parent may have died before the line above
        _run(channel)
    except NodeGone:
        return 1
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(NodeGone):
            channel.send(Fatal(*_last_word(error)))
        return 1
    finally:
        channel.close()
    return 0


def _run(channel: Channel) -> None:
    init = channel.receive()
    if init is None or isinstance(init, Shutdown):
        return
    if not isinstance(init, Init):
        raise FrameError("the first message must be Init")
    _check(init)
    _settle(init)
    rank = Rank(init, channel)
    while isinstance(message := channel.receive(), Plan):
        channel.send(rank.step(message))
    if isinstance(message, Init):
        raise FrameError("a second Init")


def _check(init: Init) -> None:
    if init.tp != 1 or init.rank != 0:
        raise ConfigError(f"rank {init.rank} of tp {init.tp}: only tp 1 is supported", param="tp")
    if init.fault and init.fault not in FAULTS:
        raise ConfigError(f"fault {init.fault!r}: expected one of {', '.join(FAULTS)}", param="fault")
    if init.fault and not init.gate:
        raise ConfigError(f"fault {init.fault!r} is for tests: refused without gate", param="fault")
    if init.threads < 1:
        raise ConfigError(f"threads is {init.threads}; at least 1 is needed", param="threads")


def _settle(init: Init) -> None:
    """Give the process its CPUs and its number of threads. Before torch and numba are imported: both read
    the environment once."""
    _prctl(_PR_SET_NAME, f"pdserve-rank{init.rank}".encode())
    if init.cpus is not None:
        try:
            os.sched_setaffinity(0, init.cpus)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cpus {init.cpus}: cannot run there: {error}", param="cpus") from error
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(init.threads)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class Rank:
    """A loaded model, its arena and its counter: what executes plans. Construction ends with Ready sent."""

    def __init__(self, init: Init, channel: Channel) -> None:
        card = load_card(init.model_dir)  # what can be refused is refused before torch is imported
        import torch

        from pdserve.models.loader import kv_page_bytes, load_model, resolve_kv_dtype
        from pdserve.worker.runner import ModelRunner

        torch.set_num_threads(init.threads)
        torch.manual_seed(init.seed)
        kv_dtype = resolve_kv_dtype(init.kv_cache_dtype)
        page_bytes = kv_page_bytes(card, init.page_size, kv_dtype, init.tp)
        num_pages = _num_pages(init, card.num_layers * page_bytes)
        model = load_model(
            init.model_dir,
            dtype=init.dtype,
            batch_invariant=init.batch_invariant,
            rank=init.rank,
            tp=init.tp,
            on_progress=_Progress(channel),
        )
        self._arena = MemfdArena.create(card.num_layers * num_pages * page_bytes, f"pdserve-kv-{init.rank}")
        self._counter = LayerCounter.create()
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ticks = LayerTicks(
            self._counter,
            self._event_fd,
            card.num_layers,
            while_held=channel.check if init.gate else None,
            early=init.fault == "early_tick",
        )
        self._runner = ModelRunner(
            model,
            self._arena.buffer,
            num_pages=num_pages,
            page_size=init.page_size,
            max_num_seqs=init.max_num_seqs,
            max_num_batched_tokens=init.max_num_batched_tokens,
            max_model_len=init.max_model_len,
            batch_invariant=init.batch_invariant,
            kv_dtype=kv_dtype,
            on_layer=self._ticks.layer_done,
        )
        self._runner.warm_up()
        gc.collect()
        gc.freeze()  # what is loaded stays: later collections look at a step's garbage alone
        ready = Ready(
            pid=os.getpid(),
            num_pages=num_pages,
            page_size=init.page_size,
            arena_bytes=self._arena.length,
            layers=card.num_layers,
            kv_heads=card.num_kv_heads,
            head_dim=card.head_dim,
            dtype=kv_dtype,
            page_bytes=page_bytes,
            vocab_size=card.vocab_size,
        )
        channel.send(ready, [self._arena.fileno(), self._counter.fileno(), self._event_fd])

    def step(self, plan: Plan) -> StepResult:
        """Execute a plan. Raises StepFailed (the persistent batch is lost then) or NodeGone."""
        started = time.monotonic_ns()
        try:
            self._ticks.begin(plan)
            outputs = self._runner.execute(plan)
            self._ticks.end()
        except NodeGone:
            raise
        except Exception as error:
            raise StepFailed(
                f"step {plan.step} ({len(plan.work)} sequences) failed: {_named(error)}",
                code="out_of_memory" if _is_out_of_memory(error) else None,
            ) from error
        return StepResult(plan.step, outputs, started, time.monotonic_ns())


class _Progress:
    """Loading progress as messages; not more than `_PROGRESS_PARTS` of them, and always the last."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._told = -1

    def __call__(self, loaded: int, total: int) -> None:
        part = loaded * _PROGRESS_PARTS // total if total else _PROGRESS_PARTS
        if part > self._told:
            self._told = part
            self._channel.send(LoadProgress(loaded, total))


def _num_pages(init: Init, bytes_of_all_layers: int) -> int:
    """Pages of the arena. Raises ConfigError where they're too few, or more than the memory there is."""
    num_pages = init.num_pages or init.kv_cache_memory_bytes // bytes_of_all_layers
    if num_pages < 2:
        budget = f"kv_cache_memory_bytes {init.kv_cache_memory_bytes} holds {num_pages} pages of "
        asked = f"num_pages is {num_pages}, of "
        raise ConfigError(
            f"{asked if init.num_pages else budget}{bytes_of_all_layers} bytes each; "
            "at least 2 are needed, one of them for padding",
            param="num_pages" if init.num_pages else "kv_cache_memory_bytes",
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_pages * bytes_of_all_layers > memory:
        raise ConfigError(
            f"a KV cache of {num_pages} pages takes {num_pages * bytes_of_all_layers} bytes; "
            f"this machine has {memory}",
            param="num_pages" if init.num_pages else "kv_cache_memory_bytes",
        )
    return num_pages


def _last_word(error: Exception) -> tuple[str, str]:
    """Message and code of Fatal."""
    if isinstance(error, PdserveError):
        return error.message, error.code
    if _is_out_of_memory(error):
        return f"out of memory: {_named(error)}", "out_of_memory"
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read the model: {error}", ModelError.code
    return _named(error), "internal_error"


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU, torch raises a bare RuntimeError.
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "memory" in str(error) and "alloc" in str(error)
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_char_p(argument) if isinstance(argument, bytes) else int(argument)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
