"""A tiny random Llama with the default model's tokeniser: for what is about nodes and not about a model.

Its attention is peaky and its values are large, so that the text it makes depends on the KV of every page of
its prompt: a lost, swapped or overwritten page shows in the text.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LAYERS = 4
HIDDEN = 64
KV_HEADS = 2
HEAD_DIM = 16
VOCABULARY = 49152
MAX_MODEL_LEN = 2048


def write_tiny_model(folder: Path, tokenizer_from: Path, *, seed: int = 0, layers: int = LAYERS) -> Path:
    """Write the checkpoint into `folder`; two seeds are two models. Tokeniser and template are copied."""
    random = np.random.default_rng(seed)

    def weight(gain: float, *shape: int) -> Any:
        return (random.standard_normal(shape) * (gain / shape[-1] ** 0.5)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(HIDDEN**0.5, VOCABULARY, HIDDEN),
        "lm_head.weight": weight(1.0, VOCABULARY, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}self_attn.q_proj.weight"] = weight(1.5, HIDDEN, HIDDEN)
        tensors[f"{prefix}self_attn.k_proj.weight"] = weight(1.5, KV_HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}self_attn.v_proj.weight"] = weight(2.0, KV_HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = weight(2.0, HIDDEN, HIDDEN)
        for name, rows, columns in (("gate", 128, HIDDEN), ("up", 128, HIDDEN), ("down", HIDDEN, 128)):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = weight(1.0, rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(layers)))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, folder / name)
    return folder


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
