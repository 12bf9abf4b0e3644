"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import numpy as np
import torch

from pdserve.layers import kernels


class RmsNorm:
    """x / rms(x) · weight over the last dimension; weight [size], kept as float32."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight.float().numpy().copy()
        self._epsilon = np.float32(epsilon)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, size] float32 -> a new tensor of the same shape."""
        out = torch.empty_like(x)
        kernels.rms_norm(x.numpy(), self._weight, self._epsilon, out.numpy())
        return out
