"""The default model, SmolLM2-135M-Instruct: found, checked, and converted once."""

from __future__ import annotations

from pathlib import Path


def ensure_default_model(cache_dir: str | Path) -> Path:
    """The directory of the converted default model under `cache_dir`, made on the first call."""
    raise NotImplementedError
