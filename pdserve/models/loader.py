"""Load a HF-style model directory into a model that runs on this rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdserve.models.card import ModelCard

Progress = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes), now and then and at the end."""


def load_model(
    model_dir: str | Path,
    *,
    dtype: str = "auto",
    batch_invariant: bool = False,
    rank: int = 0,
    tp: int = 1,
    on_progress: Progress | None = None,
) -> Any:
    """A model with `.card`, `.num_layers`, `.dtype` ("float16" or "float32": how weights are kept)."""
    raise NotImplementedError


def resolve_kv_dtype(kv_cache_dtype: str) -> str:
    """ "auto" is the compute type, float32 on a CPU."""
    raise NotImplementedError


def kv_page_bytes(card: ModelCard, page_size: int, kv_dtype: str, tp: int = 1) -> int:
    """Bytes of one page of one layer of one rank."""
    raise NotImplementedError
