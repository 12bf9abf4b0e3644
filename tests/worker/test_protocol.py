"""Worker messages survive the wire; what is none is refused with a reason."""

from __future__ import annotations

import pytest

from pdserve.engine.plan import MorePages, NewSequence, Plan, SequenceOutput, StepResult, Work
from pdserve.engine.sampling import SamplingParams
from pdserve.worker.frames import HEADER_SIZE, FrameError
from pdserve.worker.protocol import (
    Fatal,
    FromWorker,
    Init,
    LoadProgress,
    Ready,
    Shutdown,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    encode,
)

PLAN = Plan(
    step=3,
    new=[
        NewSequence(
            1, [5, 6, 7], 3, [9], SamplingParams(seed=1, logit_bias={4: -1.5}, stop_token_ids=(2, 0))
        ),
        NewSequence(2, [8], 1, [], None),
    ],
    pages=[MorePages(4, [10, 11])],
    finished=[7],
    work=[Work(1, 0, 3, True)],
    send=True,
)
READY = Ready(
    pid=1,
    num_pages=8,
    page_size=16,
    arena_bytes=4096,
    layers=2,
    kv_heads=3,
    head_dim=64,
    dtype="float32",
    page_bytes=256,
    vocab_size=99,
)


@pytest.mark.parametrize(
    "message", [Init(model_dir="/m", max_model_len=128, cpus=[0, 3], gate=True), PLAN, Shutdown()]
)
def test_to_the_worker(message: ToWorker) -> None:
    assert decode_to_worker(encode(message)[HEADER_SIZE:]) == message


@pytest.mark.parametrize(
    "message",
    [
        LoadProgress(1, 2),
        READY,
        StepResult(3, [SequenceOutput(1, 42), SequenceOutput(2, 7, -0.5, [(7, -0.5)])], 10, 20),
        Fatal("why", "bad_model"),
    ],
)
def test_from_the_worker(message: FromWorker) -> None:
    assert decode_from_worker(encode(message)[HEADER_SIZE:]) == message


@pytest.mark.parametrize(
    "payload", [b"\x00", b"\xc1", b"garbage", encode(READY)[HEADER_SIZE:-1], encode(READY)[HEADER_SIZE:]]
)
def test_a_worker_refuses_what_no_node_says(payload: bytes) -> None:
    with pytest.raises(FrameError, match="not a message of a node"):
        decode_to_worker(payload)


@pytest.mark.parametrize("payload", [b"\x00", b"\xc1", b"garbage", encode(PLAN)[HEADER_SIZE:]])
def test_a_node_refuses_what_no_worker_says(payload: bytes) -> None:
    with pytest.raises(FrameError, match="not a message of a worker"):
        decode_from_worker(payload)
