"""A tiny random Llama checkpoint, and the Init of a worker that serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pdserve.worker.protocol import Init

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path) -> Path:
    random = np.random.default_rng(0)

    def weight(*shape: int) -> Any:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    hidden, inner = 64, 96
    tensors = {
        "model.embed_tokens.weight": weight(128, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", 64), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM), ("o", 64)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = weight(rows, hidden)
        tensors[f"{prefix}mlp.gate_proj.weight"] = weight(inner, hidden)
        tensors[f"{prefix}mlp.up_proj.weight"] = weight(inner, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = weight(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(hidden, np.float32)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def init(tmp_path_factory: pytest.TempPathFactory) -> Init:
    return Init(
        model_dir=str(write_checkpoint(tmp_path_factory.mktemp("model"))),
        page_size=16,
        num_pages=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        batch_invariant=True,
        gate=True,
    )
