"""Load a HF-style model directory into a model that runs on this rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch

from pdserve.errors import ModelError
from pdserve.layers.linear import has_native_half
from pdserve.models.card import ModelCard, load_card
from pdserve.models.checkpoint import Checkpoint, TensorEntry
from pdserve.models.llama import LlamaModel, tensor_shapes

Progress = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes) after each tensor."""

_NUMBA: Any = numba.config
_TORCH_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_model(
    model_dir: str | Path,
    *,
    dtype: str = "auto",
    batch_invariant: bool = False,
    rank: int = 0,
    tp: int = 1,
    on_progress: Progress | None = None,
) -> LlamaModel:
    """A model whose weights are packed for this CPU, on `torch.get_num_threads()` threads.

    `dtype` is how matrices are kept; sums are float32 always. "auto" keeps a float16 checkpoint as it is
    (exact, half the memory traffic) and widens any other to float32. `batch_invariant` changes nothing here:
    all CPU kernels give a row the same bits in any batch. Raises `ModelError` with file, tensor, expected and
    found.
    """
    if tp != 1 or rank != 0:
        raise ModelError(f"tensor parallelism is not supported yet: rank {rank} of {tp}")
    card = load_card(model_dir)
    checkpoint = Checkpoint(model_dir)
    entries = _check(checkpoint, card)
    kept = _kept_dtype(dtype, entries["model.embed_tokens.weight"])
    total = sum(entry.nbytes for entry in entries.values())
    loaded = 0

    def take(name: str) -> torch.Tensor:
        nonlocal loaded
        entry = entries[name]
        tensor = _tensor(checkpoint, entry)
        if len(entry.shape) == 2:
            tensor = _convert(tensor, kept, entry)
        loaded += entry.nbytes
        if on_progress is not None:
            on_progress(loaded, total)
        return tensor

    threads = min(torch.get_num_threads(), _NUMBA.NUMBA_NUM_THREADS)
    if threads > 1:
        numba.set_num_threads(threads)
    return LlamaModel(card, take, dtype=kept, threads=threads)


def resolve_kv_dtype(kv_cache_dtype: str) -> str:
    """The KV cache's element type: "auto" is the compute type, float32 on a CPU."""
    if kv_cache_dtype == "auto":
        return "float32"
    if kv_cache_dtype not in ("float32", "float16"):
        raise ModelError(f"kv_cache_dtype is {kv_cache_dtype!r}; supported on a CPU: auto, float32, float16")
    return kv_cache_dtype


def kv_page_bytes(card: ModelCard, page_size: int, kv_dtype: str, tp: int = 1) -> int:
    """Bytes of one page of one layer of one rank: [head][K|V][token][dim]."""
    if tp != 1:
        raise ModelError(f"tensor parallelism is not supported yet: tp is {tp}")
    item = {"float32": 4, "float16": 2}[resolve_kv_dtype(kv_dtype)]
    return card.num_kv_heads * 2 * page_size * card.head_dim * item


def _check(checkpoint: Checkpoint, card: ModelCard) -> dict[str, TensorEntry]:
    """The tensors the model needs, once their names, shapes and types are known to fit."""
    expected = tensor_shapes(card)
    found = checkpoint.tensors
    where = ", ".join(str(file) for file in checkpoint.files[:3])
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: tensor {name} is missing; expected shape {list(shape)}")
        entry = found[name]
        if entry.shape != shape:
            raise ModelError(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}; expected {list(shape)} "
                "from config.json"
            )
        if entry.dtype not in _TORCH_TYPES:
            raise ModelError(f"{entry.file}: tensor {name} is {entry.dtype}; expected F16, BF16 or F32")
    for name, entry in found.items():
        # Old checkpoints store rotary frequencies, and tied ones may repeat the embedding as the head.
        redundant = name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and card.tie_word_embeddings
        )
        if name not in expected and not redundant:
            raise ModelError(
                f"{entry.file}: unexpected tensor {name} {list(entry.shape)}; "
                f"config.json describes a {card.architecture} without it"
            )
    return {name: found[name] for name in expected}


def _kept_dtype(dtype: str, embedding: TensorEntry) -> str:
    if dtype == "auto":
        return "float16" if embedding.dtype == "F16" and has_native_half() else "float32"
    if dtype not in ("float32", "float16"):
        raise ModelError(f"dtype is {dtype!r}; supported on a CPU: auto, float32, float16")
    return dtype


def _tensor(checkpoint: Checkpoint, entry: TensorEntry) -> torch.Tensor:
    with warnings.catch_warnings():
        # The mapping may be read-only in torch's eyes; nothing here writes to it.
        warnings.simplefilter("ignore")
        flat = torch.frombuffer(checkpoint.read(entry), dtype=_TORCH_TYPES[entry.dtype])
    return flat.view(entry.shape)


def _convert(tensor: torch.Tensor, kept: str, entry: TensorEntry) -> torch.Tensor:
    if kept == "float32":
        return tensor.float()
    converted = tensor.half()
    if entry.dtype != "F16" and not bool(converted.isfinite().all()):
        raise ModelError(f"{entry.file}: tensor {entry.name} does not fit float16; use dtype float32")
    return converted
