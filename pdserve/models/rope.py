"""Rotary frequencies of a model card."""

from __future__ import annotations

import math

import torch

from pdserve.models.card import RopeCard


def rope_frequencies(rope: RopeCard, head_dim: int) -> torch.Tensor:
    """float32 [head_dim/2], by the same float32 operations as HF's reference."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "llama3":
        return _stretch_low_frequencies(rope, frequencies)
    return frequencies


def _stretch_low_frequencies(rope: RopeCard, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a blend between."""
    low = rope.original_max_position_embeddings / rope.low_freq_factor
    high = rope.original_max_position_embeddings / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)
