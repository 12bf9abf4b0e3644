"""What the rank process refuses before it loads anything, and its last words."""

from __future__ import annotations

import errno

import msgspec
import pytest

from pdserve.errors import ConfigError, ModelError
from pdserve.worker.main import StepFailed, _last_word, _num_pages
from pdserve.worker.protocol import Init

INIT = Init(model_dir="/m", max_model_len=128)


def test_pages_come_from_the_budget_unless_they_are_given() -> None:
    budget = msgspec.structs.replace(INIT, kv_cache_memory_bytes=10_005)
    assert _num_pages(budget, 1000) == 10
    assert _num_pages(msgspec.structs.replace(budget, num_pages=7), 1000) == 7


@pytest.mark.parametrize(
    ("num_pages", "budget", "says", "param"),
    [
        (0, 20_000, "kv_cache_memory_bytes 20000 holds 1 pages of 12000 bytes", "kv_cache_memory_bytes"),
        (1, 1 << 30, "num_pages is 1, of 12000 bytes", "num_pages"),
        (-3, 1 << 30, "num_pages is -3", "num_pages"),
        (1 << 50, 1 << 30, "this machine has", "num_pages"),
        (0, 1 << 60, "this machine has", "kv_cache_memory_bytes"),
    ],
)
def test_an_arena_that_cannot_be_is_refused_by_name(
    num_pages: int, budget: int, says: str, param: str
) -> None:
    init = msgspec.structs.replace(INIT, num_pages=num_pages, kv_cache_memory_bytes=budget)
    with pytest.raises(ConfigError, match=says) as caught:
        _num_pages(init, 12_000)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (ModelError("config.json is missing"), "config.json is missing", "bad_model"),
        (StepFailed("step 3 failed"), "step 3 failed", "step_failed"),
        (MemoryError("no room"), "out of memory: MemoryError: no room", "out_of_memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            "out of memory: RuntimeError: DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 8 bytes",
            "out_of_memory",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/m/model.safetensors"),
            "cannot read the model: [Errno 13] Permission denied: '/m/model.safetensors'",
            "bad_model",
        ),
        (ZeroDivisionError("why"), "ZeroDivisionError: why", "internal_error"),
    ],
)
def test_last_words(error: Exception, message: str, code: str) -> None:
    assert _last_word(error) == (message, code)
