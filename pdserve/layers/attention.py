"""Paged attention on a CPU: one kernel for decode tokens and prefill chunks alike.

The context of a row is walked in blocks of 64 tokens, cut by absolute position whatever the page size, with a
running maximum and sum (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867). Up to 16 query
tokens, with all the query heads that share a KV head, form a tile, so that a block of K and V is fetched and
transposed once for all of them.

A row's bits depend on its own query and context only: each score and each output element is one chain of
fused multiply-adds in the order of head dimension or position, the blocks are the same for every row, and a
block past the end of a row (another row of the tile may need it) adds exact zeros. So a token computed in a
chunk and the same token computed in a decode step agree to the bit.

NaN and infinity of other tenants cannot leak in: of a page only the slots up to the tile's last position are
read.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pdserve.layers.jit import as_float, kernel, parallel_kernel
from pdserve.layers.kernels import exponential, rope_and_append
from pdserve.layers.rope import RopeTable
from pdserve.layers.step import StepBatch
from pdserve.layers.tiles import PANEL, add_panel, set_panel, transpose_8x8

BLOCK = 64
"""Tokens of context in a block."""

TILE = 16
"""Query tokens in a tile."""

_ZERO, _ONE = np.float32(0), np.float32(1)
_MINUS_INFINITY = np.float32(-np.inf)


@kernel
def _load_block(
    kv: Any, head: int, table: Any, first: int, count: int, rows: Any, keys: Any, values: Any
) -> None:
    """Fetch tokens [first, first + count) of one KV head as panels: keys [4, ≥dim, 16], values [·, 64, 16].

    `rows` [64, keys.shape[1]] is scratch, with zeros beyond the head dimension.
    """
    page_size, dim = kv.shape[3], kv.shape[4]
    whole = dim // PANEL
    for t in range(count):
        page = table[(first + t) // page_size]
        slot = (first + t) % page_size
        for d in range(dim):
            rows[t, d] = as_float(kv[page, head, 0, slot, d])
        for p in range(whole):
            for d in range(PANEL):
                values[p, t, d] = as_float(kv[page, head, 1, slot, p * PANEL + d])
        for d in range(whole * PANEL, dim):
            values[whole, t, d - whole * PANEL] = as_float(kv[page, head, 1, slot, d])
    for t in range(0, count, 8):
        for d in range(0, keys.shape[1], 8):
            transpose_8x8(rows, t, d, keys)


@kernel
def _weigh(scores: Any, i: int, valid: int, tops: Any, sums: Any, totals: Any, lanes: Any) -> None:
    """Turn row i's scores of a block into weights; fold its maximum and sum; rescale its totals."""
    for t in range(max(valid, 0), BLOCK):
        scores[i, t] = _MINUS_INFINITY
    top = tops[i]
    # By lanes, because without leave to reorder the compiler keeps a plain maximum scalar.
    for t in range(PANEL):
        a, b = scores[i, t], scores[i, t + PANEL]
        c, e = scores[i, t + 2 * PANEL], scores[i, t + 3 * PANEL]
        a = a if a > b else b
        c = c if c > e else e
        lanes[t] = a if a > c else c
    for t in range(PANEL):
        top = lanes[t] if lanes[t] > top else top
    keep = exponential(tops[i] - top)
    tops[i] = top
    for t in range(BLOCK):
        scores[i, t] = exponential(scores[i, t] - top)
    for t in range(max(valid, 0), BLOCK):
        scores[i, t] = _ZERO
    for t in range(PANEL):
        part = scores[i, t] + scores[i, t + PANEL] + scores[i, t + 2 * PANEL] + scores[i, t + 3 * PANEL]
        sums[i, t] = sums[i, t] * keep + part
    if keep != _ONE:
        for d in range(totals.shape[1]):
            totals[i, d] = totals[i, d] * keep


@kernel
def _attend_tile(
    item: int, qkv: Any, kv: Any, heads: int, tables: Any, tiles: Any, scale: Any, out: Any
) -> None:
    """Attention of one tile's rows with the query heads of one KV head: item = tile · kv_heads + kv head."""
    kv_heads = kv.shape[1]
    tile = item // kv_heads
    head = item % kv_heads
    group = heads // kv_heads
    row, count, position = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
    table = tables[tiles[tile, 3]]
    dim = kv.shape[4]
    rows = count * group
    wide = (dim + PANEL - 1) // PANEL
    queries = np.empty((rows, dim), np.float32)
    depth = (dim + 7) // 8 * 8
    fetched = np.zeros((BLOCK, depth), np.float32)
    keys = np.zeros((BLOCK // PANEL, depth, PANEL), np.float32)
    values = np.zeros((wide, BLOCK, PANEL), np.float32)
    scores = np.empty((rows, BLOCK), np.float32)
    totals = np.zeros((rows, wide * PANEL), np.float32)
    sums = np.zeros((rows, PANEL), np.float32)
    lanes = np.empty(PANEL, np.float32)
    tops = np.empty(rows, np.float32)
    for i in range(rows):
        tops[i] = _MINUS_INFINITY
        first = (head * group + i % group) * dim
        for d in range(dim):
            queries[i, d] = qkv[row + i // group, first + d] * scale
    length = position + count
    for block in range(0, length, BLOCK):
        tokens = min(BLOCK, length - block)
        _load_block(kv, head, table, block, tokens, fetched, keys, values)
        for p in range(BLOCK // PANEL):
            set_panel(queries, 0, rows, keys, p, dim, scores)
        for i in range(rows):
            _weigh(scores, i, min(tokens, position + i // group + 1 - block), tops, sums, totals, lanes)
        for p in range(wide):
            add_panel(scores, 0, rows, values, p, tokens, totals)
    for i in range(rows):
        weight = _ZERO
        for t in range(PANEL):
            weight += sums[i, t]
        first = (head * group + i % group) * dim
        for d in range(dim):
            out[row + i // group, first + d] = totals[i, d] / weight


@kernel
def paged_attention(qkv: Any, kv: Any, heads: int, tables: Any, tiles: Any, scale: Any, out: Any) -> None:
    """For each tile (row, count, position, table) of `tiles`: out[row:row+count] = attention of those rows.

    qkv [rows, ≥ heads·dim], rotated queries first; kv [page, kv_head, K|V, slot, dim] of one layer;
    tables [·, pages]; out [rows, heads·dim].
    """
    for item in range(tiles.shape[0] * kv.shape[1]):
        _attend_tile(item, qkv, kv, heads, tables, tiles, scale, out)


@parallel_kernel
def paged_attention_parallel(
    qkv: Any, kv: Any, heads: int, tables: Any, tiles: Any, scale: Any, out: Any
) -> None:
    """`paged_attention`, its tiles and heads shared out among threads."""
    for item in numba.prange(tiles.shape[0] * kv.shape[1]):
        _attend_tile(item, qkv, kv, heads, tables, tiles, scale, out)


def cut_tiles(spans: list[tuple[int, int, int, int]]) -> NDArray[np.int64]:
    """Cut (row, count, position, table) spans into tiles of at most `TILE` query tokens.

    Long and short contexts are dealt in turn, so that threads that take consecutive tiles get equal shares.
    """
    tiles = [
        (row + cut, min(TILE, count - cut), position + cut, table)
        for row, count, position, table in spans
        for cut in range(0, count, TILE)
    ]
    tiles.sort(key=lambda tile: tile[1] * (tile[2] + tile[1]))
    dealt = [tiles[i // 2] if i % 2 == 0 else tiles[-1 - i // 2] for i in range(len(tiles))]
    return np.array(dealt, dtype=np.int64).reshape(-1, 4)


class PagedCache:
    """A rank's arena seen as `[layer][page][head][K|V][slot][dim]`; the buffer stays the caller's."""

    def __init__(
        self,
        buffer: Any,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: str,
    ) -> None:
        kind = np.dtype({"float32": np.float32, "float16": np.uint16}[dtype])
        shape = (layers, pages, kv_heads, 2, page_size, head_dim)
        size = math.prod(shape)
        flat = np.frombuffer(buffer, dtype=kind, count=size)
        self.layers = list(flat.reshape(shape))
        self.pages = pages
        self.page_size = page_size


class PagedAttention:
    """Rotate, append K and V to the cache, attend; for one layer's fused q, k, v."""

    def __init__(self, heads: int, head_dim: int, threads: int) -> None:
        self._heads = heads
        self._width = heads * head_dim
        self._scale = np.float32(head_dim**-0.5)
        self._run = paged_attention if threads == 1 else paged_attention_parallel

    def __call__(
        self, qkv: torch.Tensor, batch: StepBatch, rope: RopeTable, kv: NDArray[Any]
    ) -> torch.Tensor:
        """qkv [rows, ≥ (heads + 2·kv_heads)·dim] float32 (overwritten) -> [rows, heads·dim]."""
        rows = qkv.numpy()
        rope_and_append(
            rows, self._heads, rope.cosine, rope.sine, batch.positions, batch.pages, batch.slots, kv
        )
        out = torch.empty(qkv.shape[0], self._width)
        self._run(rows, kv, self._heads, batch.tables, batch.tiles, self._scale, out.numpy())
        return out
