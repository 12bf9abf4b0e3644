"""Each kernel against float64, and its rows' bits alone and in company."""

from __future__ import annotations

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdserve.layers import kernels
from pdserve.layers.attention import cut_tiles, paged_attention, paged_attention_parallel
from pdserve.layers.jit import kernel
from pdserve.layers.linear import PackedMatrix

RNG = np.random.default_rng(3)


def floats(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape, dtype=np.float32)


@kernel
def _exponentials(x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    for i in range(x.shape[0]):
        out[i] = kernels.exponential(x[i])


def test_exponential_is_exact_to_a_unit_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 200_001, dtype=np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(out / exact - 1).max() < 1.2e-7
    edges = np.array([0.0, -np.inf, -1000.0, 1000.0], np.float32)
    out = np.empty_like(edges)
    _exponentials(edges, out)
    assert out[0] == 1.0
    assert out[1] == out[2] < 1e-37
    assert out[3] > 1e38
    assert np.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(33, 50), (192, 64), (1, 3), (16, 577)])
def test_a_row_of_a_product_is_the_same_in_any_batch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.from_numpy(floats(*shape)).to(dtype)
    matrix = PackedMatrix(weight, threads=1)
    x = torch.from_numpy(floats(600, shape[1]))
    alone = torch.cat([matrix(x[i : i + 1].contiguous()) for i in range(600)])
    for rows in [*range(1, 130), 239, 240, 241, 512, 600]:
        start = int(RNG.integers(0, 601 - rows))
        assert torch.equal(matrix(x[start : start + rows].contiguous()), alone[start : start + rows]), rows
    exact = x.double() @ weight.double().T
    assert (alone[:, : shape[0]].double() - exact).abs().max() < 1e-5 * shape[1] ** 0.5 * exact.std()
    assert not alone[:, shape[0] :].any()
    ids = torch.tensor([0, shape[0] - 1, shape[0] // 2])
    assert torch.equal(matrix.rows(ids), weight[ids].float())


def test_float16_weights_are_used_exactly() -> None:
    half = torch.from_numpy(floats(40, 70)).half()
    half[0, :3] = torch.tensor([6e-8, -65504.0, 6e-5])
    x = torch.from_numpy(floats(5, 70))
    assert torch.equal(PackedMatrix(half, 1)(x), PackedMatrix(half.float(), 1)(x))


def attention_case(
    spans: list[tuple[int, int]], page_size: int, dim: int, heads: int, kv_heads: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """(count, position) spans -> qkv, one layer's pages, page tables, tiles. The scrap page holds NaN."""
    needed = [-(-(count + position) // page_size) for count, position in spans]
    pages = floats(sum(needed) + 1, kv_heads, 2, page_size, dim)
    pages[0] = np.nan
    ids = RNG.permutation(sum(needed)) + 1
    tables = np.zeros((len(spans), max(needed)), np.int64)
    rows, cut = [], 0
    row = 0
    for index, (count, position) in enumerate(spans):
        tables[index, : needed[index]] = ids[cut : cut + needed[index]]
        cut += needed[index]
        # What lies behind the last token must not matter, whatever it is.
        last = tables[index, needed[index] - 1]
        pages[last, :, :, (count + position - 1) % page_size + 1 :] = np.nan
        rows.append((row, count, position, index))
        row += count
    return floats(row, (heads + 2 * kv_heads) * dim), pages, tables, cut_tiles(rows)


SPANS = [(1, 0), (1, 63), (1, 64), (70, 0), (17, 130), (1, 300), (5, 60)]


@pytest.mark.parametrize(
    ("page_size", "dim", "heads", "kv_heads"), [(16, 64, 9, 3), (7, 10, 4, 4), (32, 24, 8, 1)]
)
def test_attention_is_softmax_attention(page_size: int, dim: int, heads: int, kv_heads: int) -> None:
    qkv, pages, tables, tiles = attention_case(SPANS, page_size, dim, heads, kv_heads)
    out = np.full((len(qkv), heads * dim), np.nan, np.float32)
    paged_attention(qkv, pages, heads, tables, tiles, np.float32(dim**-0.5), out)
    row = 0
    for index, (count, position) in enumerate(SPANS):
        held = pages[tables[index]].astype(np.float64).transpose(1, 2, 0, 3, 4)
        k, v = held.reshape(kv_heads, 2, -1, dim).swapaxes(0, 1)
        for i in range(count):
            length = position + i + 1
            for head in range(heads):
                q = qkv[row, head * dim : (head + 1) * dim].astype(np.float64)
                shared = head // (heads // kv_heads)
                weights = np.exp(k[shared, :length] @ q * dim**-0.5)
                exact = weights @ v[shared, :length] / weights.sum()
                found = out[row, head * dim : (head + 1) * dim]
                assert np.abs(found - exact).max() < 2e-6
            row += 1


def test_threads_do_not_change_a_bit() -> None:
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
    qkv, pages, tables, tiles = attention_case(SPANS, 16, 16, 4, 2)
    one, many = np.empty((len(qkv), 64), np.float32), np.empty((len(qkv), 64), np.float32)
    paged_attention(qkv, pages, 4, tables, tiles, np.float32(0.25), one)
    paged_attention_parallel(qkv, pages, 4, tables, tiles, np.float32(0.25), many)
    assert one.tobytes() == many.tobytes()
    weight, x = torch.from_numpy(floats(100, 40)), torch.from_numpy(floats(33, 40))
    assert torch.equal(PackedMatrix(weight, threads=1)(x), PackedMatrix(weight, threads=3)(x))


def test_tiles_cover_every_row_once() -> None:
    tiles = cut_tiles([(0, 40, 7, 0), (40, 1, 900, 1), (41, 16, 0, 2)])
    assert tiles.shape == (5, 4)
    covered = sorted(row + i for row, count, _, _ in tiles.tolist() for i in range(count))
    assert covered == list(range(57))
    assert all(position - 7 == row for row, _, position, table in tiles.tolist() if table == 0)
    assert cut_tiles([]).shape == (0, 4)
