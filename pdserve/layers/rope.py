"""Rotary position embedding: the tables of cosines and sines (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

import torch


class RopeTable:
    """cos and sin of position · frequency [positions, dim/2], all in float32 as HF's reference has it."""

    def __init__(self, frequencies: torch.Tensor, positions: int) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
        self.cosine = angles.cos().numpy()
        self.sine = angles.sin().numpy()
