"""Logits against transformers in float32, on the same files: within 1e-4 of their standard deviation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdserve.layers import attention, kernels
from tests.models.checkpoints import random_tokens, reference_logits, write_checkpoint
from tests.worker.rig import Rig

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one head each": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "three to one, tied": {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 72,
        "tie_word_embeddings": True,
    },
    "nothing divides": {
        "hidden_size": 45,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "head_dim": 10,
        "intermediate_size": 37,
        "vocab_size": 103,
    },
    "wide heads": {"head_dim": 80},
    "other theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}
TOKENS = random_tokens(150)
CHUNKS = [1, 7, 64, 3, 50, 1, 1, 23]
"""Odd sizes, across pages and across attention blocks of 64; decode steps among them."""


def deviation(found: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    return float(np.abs(found - reference).max() / reference.std())


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_match_at_every_position(shape: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, **SHAPES[shape])
    reference = reference_logits(directory, TOKENS)
    rig = Rig(directory)
    whole = rig.force(1, TOKENS, [len(TOKENS)])
    chunked = rig.force(2, TOKENS, CHUNKS)
    decoded = rig.force(3, TOKENS, [1] * len(TOKENS))
    assert deviation(whole, reference[-1:]) < 1e-4
    assert deviation(chunked, reference[np.cumsum(CHUNKS) - 1]) < 1e-4
    assert deviation(decoded, reference) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention_kind", ["eager", "sdpa"])
def test_narrow_checkpoints_lose_nothing_more(
    dtype: torch.dtype, attention_kind: str, tmp_path: Path
) -> None:
    directory = write_checkpoint(tmp_path, dtype=dtype)
    rig = Rig(directory)
    assert rig.model.dtype == {torch.float16: "float16", torch.bfloat16: "float32"}[dtype]
    found = rig.force(1, TOKENS, CHUNKS)
    reference = reference_logits(directory, TOKENS, attention_kind)[np.cumsum(CHUNKS) - 1]
    assert deviation(found, reference) < 1e-4


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 100])
def test_page_size_does_not_change_a_bit(page_size: int, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    usual = Rig(directory).force(1, TOKENS, [len(TOKENS)])
    assert np.array_equal(
        Rig(directory, page_size=page_size, num_pages=200).force(1, TOKENS, CHUNKS)[-1:], usual
    )


def test_half_precision_cache_is_close(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    reference = reference_logits(directory, TOKENS)[np.cumsum(CHUNKS) - 1]
    found = Rig(directory, kv_dtype="float16").force(1, TOKENS, CHUNKS)
    assert 1e-5 < deviation(found, reference) < 1e-2


def test_default_model_matches(default_model: Path, default_text: list[int]) -> None:
    reference = reference_logits(default_model, default_text, "sdpa")
    rig = Rig(default_model)
    chunks = [5, 64, 31, 1, 1, len(default_text) - 102]
    found = rig.force(1, default_text, chunks)
    rows = reference[np.cumsum(chunks) - 1]
    assert deviation(found, rows) < 1e-4
    assert list(found.argmax(1)) == list(rows.argmax(1))


def test_planted_faults_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path)
    reference = reference_logits(directory, TOKENS)[np.cumsum(CHUNKS) - 1]
    true = kernels.rope_and_append

    def late_rope(qkv: Any, heads: int, c: Any, s: Any, positions: Any, *rest: Any) -> None:
        true(qkv, heads, c, s, positions + (positions > 70), *rest)

    def shifted_head(*arguments: Any) -> None:
        true(*arguments)
        kv = arguments[-1]
        kv[:] = np.roll(kv, 1, axis=1)

    def stale_token(
        qkv: Any, heads: int, c: Any, s: Any, positions: Any, pages: Any, slots: Any, kv: Any
    ) -> None:
        true(qkv, heads, c, s, positions, np.where(positions == 9, 0, pages), slots, kv)

    for fault in (late_rope, shifted_head, stale_token):
        monkeypatch.setattr(attention, "rope_and_append", fault)
        assert deviation(Rig(directory).force(1, TOKENS, CHUNKS), reference) > 1e-3, fault.__name__
    monkeypatch.setattr(attention, "rope_and_append", true)
    assert deviation(Rig(directory).force(1, TOKENS, CHUNKS), reference) < 1e-4
