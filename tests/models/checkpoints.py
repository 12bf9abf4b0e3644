"""Small random Llama checkpoints, written by transformers, and its logits as the reference."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

with warnings.catch_warnings():
    # Importing transformers is not what these tests are about.
    warnings.simplefilter("ignore")
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

transformers.utils.logging.disable_progress_bar()

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_checkpoint(
    directory: Path, *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any
) -> Path:
    """Random weights of a visible size (HF's own initial ones are so small that many faults don't show)."""
    torch.manual_seed(7)
    with torch.random.fork_rng():
        model = LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name else 0.15
            with torch.no_grad():
                parameter.normal_(1.0 if "norm" in name else 0.0, scale)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


def reference_logits(directory: Path, tokens: list[int], attention: str = "eager") -> NDArray[np.float32]:
    """[len(tokens), vocab] of transformers in float32."""
    model = reference_model(directory, attention)
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


def reference_model(directory: Path, attention: str = "eager") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LlamaForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation=attention
        ).eval()


def random_tokens(count: int, vocab: int = 101, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]
