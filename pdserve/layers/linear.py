"""Weight matrices, packed for the tile kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import binding  # type: ignore[import-untyped]
from numpy.typing import NDArray

from pdserve.layers import kernels
from pdserve.layers.tiles import PANEL


def has_native_half() -> bool:
    """Whether this CPU converts float16 in hardware; without that, packed float16 is no gain."""
    if not binding.get_default_triple().startswith("x86"):
        return True
    return bool(binding.get_host_cpu_features().get("f16c", False))


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A CPU tensor's memory as numpy sees it; float16 as uint16, since numba knows no float16."""
    if tensor.dtype == torch.float16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


class PackedMatrix:
    """y = x · Wᵀ for a weight W [out, in] kept in panels of 16 outputs, float16 or float32; sums are float32.

    A row of y depends on that row of x alone, to the bit. float16 weights are exact (they are widened in
    registers), so the result differs from a float32 library's only in the order of its sum.
    """

    def __init__(self, weight: torch.Tensor, threads: int) -> None:
        outputs, inputs = weight.shape
        panels = -(-outputs // PANEL)
        packed = torch.zeros(panels * PANEL, inputs, dtype=weight.dtype)
        packed[:outputs] = weight
        self.outputs = outputs
        self.inputs = inputs
        self._array = as_array(packed.view(panels, PANEL, inputs).transpose(1, 2).contiguous())
        self._threads = min(threads, panels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] float32, contiguous -> [rows, out rounded up to 16], the padding columns zero."""
        out = torch.empty(x.shape[0], self._array.shape[0] * PANEL)
        if self._threads == 1:
            kernels.linear(x.numpy(), self._array, out.numpy())
        else:
            kernels.linear_parallel(x.numpy(), self._array, self._threads, out.numpy())
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """W[ids] as float32 [len(ids), in]: the embedding of tied models."""
        out = torch.empty(ids.shape[0], self.inputs)
        kernels.gather_rows(self._array, ids.numpy(), out.numpy())
        return out


class Embedding:
    """A table [vocab, size] looked up by token id; float16 or float32, given out as float32."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._table[ids].float()
