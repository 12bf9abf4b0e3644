"""Row kernels of the CPU back end: matrix product, norms, activation, rotary embedding with the KV write.

All take numpy arrays and write to `out`. Every one treats a row by itself, in one fixed order of operations:
see `jit.py` and `tiles.py` for why its bits then do not depend on the batch.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pdserve.layers.jit import as_float, as_stored, kernel, parallel_kernel, power_of_two
from pdserve.layers.tiles import PANEL, set_panels

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_E0, _E1, _E2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_E3, _E4, _E5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@kernel
def exponential(x: Any) -> Any:
    """e**x of a float32, clamped to [-87, 88], to 1e-7 relative; exactly 1 at 0.

    The classic range reduction and degree-5 polynomial of the Cephes library (S. Moshier, `expf`), because a
    call into libm would keep the loops around it from being vectorised.
    """
    x = x if x > _LOWEST else _LOWEST
    x = x if x < _HIGHEST else _HIGHEST
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _E0
    p = p * r + _E1
    p = p * r + _E2
    p = p * r + _E3
    p = p * r + _E4
    p = p * r + _E5
    p = p * (r * r) + r
    return (p + _ONE) * power_of_two(n)


@kernel
def linear(x: Any, panels: Any, out: Any) -> None:
    """out = x · B; x [M, K], B in `panels` [⌈N/16⌉, K, 16], out [M, 16·⌈N/16⌉]."""
    set_panels(x, x.shape[0], panels, 0, panels.shape[0], x.shape[1], out)


@parallel_kernel
def linear_parallel(x: Any, panels: Any, parts: int, out: Any) -> None:
    """`linear`, its panels shared out among threads in `parts`."""
    rows, depth = x.shape
    count = panels.shape[0]
    for part in numba.prange(parts):
        set_panels(x, rows, panels, count * part // parts, count * (part + 1) // parts, depth, out)


@kernel
def gather_rows(panels: Any, ids: Any, out: Any) -> None:
    """out[i] = column ids[i] of B as float32 (an embedding kept as the packed matrix of the output head)."""
    for i in range(ids.shape[0]):
        panel = ids[i] // PANEL
        lane = ids[i] % PANEL
        for k in range(out.shape[1]):
            out[i, k] = as_float(panels[panel, k, lane])


@kernel
def rms_norm(hidden: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """out = hidden / rms(hidden) · weight, row by row [rows, size]; the squares are summed in 16 lanes."""
    size = weight.shape[0]
    lanes = np.empty(PANEL, np.float32)
    for i in range(hidden.shape[0]):
        lanes[:] = _ZERO
        for k in range(0, size - size % PANEL, PANEL):
            for t in range(PANEL):
                lanes[t] += hidden[i, k + t] * hidden[i, k + t]
        for t in range(size % PANEL):
            k = size - size % PANEL + t
            lanes[t] += hidden[i, k] * hidden[i, k]
        total = _ZERO
        for t in range(PANEL):
            total += lanes[t]
        factor = _ONE / np.sqrt(total / np.float32(size) + epsilon)
        for k in range(size):
            out[i, k] = weight[k] * (hidden[i, k] * factor)


@kernel
def add_in_place(hidden: Any, delta: Any) -> None:
    """hidden += delta; delta may have padding columns."""
    for i in range(hidden.shape[0]):
        for k in range(hidden.shape[1]):
            hidden[i, k] += delta[i, k]


@kernel
def silu_multiply(gate_up: Any, out: Any) -> None:
    """out [rows, F] = silu(gate_up[:, :F]) · gate_up[:, F:2F]."""
    size = out.shape[1]
    for i in range(out.shape[0]):
        for k in range(size):
            gate = gate_up[i, k]
            out[i, k] = gate / (_ONE + exponential(-gate)) * gate_up[i, size + k]


@kernel
def rotate(qkv: Any, row: int, first: int, half: int, cosine: Any, sine: Any, position: int) -> None:
    """Rotate one head (at column `first`) of one row in place: pairs (d, d + dim/2), HF's order."""
    for d in range(half):
        x, y = qkv[row, first + d], qkv[row, first + half + d]
        c, s = cosine[position, d], sine[position, d]
        qkv[row, first + d] = x * c - y * s
        qkv[row, first + half + d] = y * c + x * s


@kernel
def rope_and_append(
    qkv: Any, heads: int, cosine: Any, sine: Any, positions: Any, pages: Any, slots: Any, kv: Any
) -> None:
    """Rotate q and k of `qkv` in place, and write k and v to page `pages[i]`, slot `slots[i]` of one layer.

    qkv [rows, (heads + 2·kv_heads)·dim]: q heads, k heads, v heads; cosine, sine [·, dim/2]; kv [page,
    kv_head, K|V, slot, dim] float32 or float16 as uint16.
    """
    kv_heads, dim = kv.shape[1], kv.shape[4]
    zero = kv[0, 0, 0, 0, 0]
    for i in range(positions.shape[0]):
        for h in range(heads + kv_heads):
            rotate(qkv, i, h * dim, dim // 2, cosine, sine, positions[i])
        page, slot = pages[i], slots[i]
        for h in range(kv_heads):
            k_first = (heads + h) * dim
            v_first = (heads + kv_heads + h) * dim
            for d in range(dim):
                kv[page, h, 0, slot, d] = as_stored(zero, qkv[i, k_first + d])
            for d in range(dim):
                kv[page, h, 1, slot, d] = as_stored(zero, qkv[i, v_first + d])
