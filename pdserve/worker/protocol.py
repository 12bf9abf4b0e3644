"""What a node and its worker process say to each other.

msgpack arrays (`array_like`: a field may only ever be appended), each with its tag, one a frame (`frames`).

    node -> worker    Init, then Plan ..., then Shutdown
    worker -> node    LoadProgress ..., Ready (with three descriptors), then a StepResult a plan; or Fatal

Plans and results are in `pdserve.engine.plan`. The end of the stream in either direction ends both sides.
"""

from __future__ import annotations

import msgspec

from pdserve.engine.plan import Plan, StepResult
from pdserve.worker.frames import FrameError, encode_frame

READY_DESCRIPTORS = 3
"""Descriptors that travel with Ready, in this order: arena (memfd), layer counter (memfd), tick eventfd."""

FAULTS = ("early_tick",)
"""Faults a test may plant. early_tick: the tick of a layer is made before that layer runs."""


class Init(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="init"):
    """The first message: what to load and how to run it.

    `num_pages`: pages of the arena, the scrap page 0 included; 0: as many as fit `kv_cache_memory_bytes`.
    `threads`: compute threads; `cpus`: the CPUs to run on, None for all. `gate`: a test may hold the worker
    after a tick (`LayerCounter.hold_at`). `fault`: one of FAULTS, refused unless `gate` is set.
    """

    model_dir: str
    page_size: int = 16
    num_pages: int = 0
    kv_cache_memory_bytes: int = 1 << 30
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int
    batch_invariant: bool = False
    threads: int = 1
    cpus: list[int] | None = None
    rank: int = 0
    tp: int = 1
    seed: int = 0
    fault: str = ""
    gate: bool = False


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Finish the plans before this message, then exit with status 0."""


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Weights loaded so far, in bytes. The last one has both numbers equal."""

    loaded_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ready"):
    """Weights are loaded, the arena exists, the kernels are warm; READY_DESCRIPTORS come with it.

    The facts of this rank's arena `[layer][page][head][K|V][token][dim]`: `num_pages` with the scrap page,
    `kv_heads` of this rank alone, `dtype` of the cache ("float32"), `page_bytes` of one page of one layer;
    `arena_bytes` = layers * num_pages * page_bytes.
    """

    pid: int
    num_pages: int
    page_size: int
    arena_bytes: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_bytes: int
    vocab_size: int


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    """The worker's last message; it exits after it.

    `code`: "bad_model", "bad_config", "out_of_memory", "step_failed", "worker_protocol" or "internal_error".
    """

    message: str
    code: str = "internal_error"


ToWorker = Init | Plan | Shutdown
FromWorker = LoadProgress | Ready | StepResult | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """The message as one frame. Raises FrameError where it is beyond the frame limit."""
    return encode_frame(_encoder.encode(message))


def decode_to_worker(payload: bytes) -> ToWorker:
    """A node's message. Raises FrameError where it is not one."""
    try:
        return _to_worker.decode(payload)
    except msgspec.MsgspecError as error:
        raise FrameError(f"not a message of a node: {error}") from error


def decode_from_worker(payload: bytes) -> FromWorker:
    """A worker's message. Raises FrameError where it is not one."""
    try:
        return _from_worker.decode(payload)
    except msgspec.MsgspecError as error:
        raise FrameError(f"not a message of a worker: {error}") from error
