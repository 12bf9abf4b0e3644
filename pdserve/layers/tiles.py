"""The one inner loop of all matrix work on a CPU: a tile of C += A·B held in vector registers.

B comes in *panels* of 16 columns: `panels[p][k][lane]` is B[k, 16·p + lane], so a step of the loop reads 16
neighbouring numbers.

```
            k →                 panel p: 16 columns
 A  row i  [a a a a a a]        k=0 [· · · · · · · · · · · · · · · ·]
    …                           k=1 [· · · · · · · · · · · · · · · ·]
    row i+R-1                    …
```

Each element of C is one chain of fused multiply-adds over k = 0, 1, 2, … and nothing else. Neither the tile's
height, nor the other rows, nor the panel's neighbours enter that chain: a row has the same bits alone and in
any batch, which is what the batch-invariant mode promises. LLVM's own vectoriser leaves a third of this
speed, so the loop is written in its vector types.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils as _cgutils
from numba.core import types

from pdserve.layers.jit import intrinsic, kernel

cgutils: Any = _cgutils

PANEL = 16
"""Columns of a panel: two vectors of eight float32."""

_LANES = 8
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)
_HALVES = ir.VectorType(ir.HalfType(), _LANES)
_I64 = ir.IntType(64)


class _Matrix:
    """A C-contiguous array argument of an intrinsic, as LLVM sees it."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        self.builder = builder
        self.data = array.data
        self.row = cgutils.unpack_tuple(builder, array.shape)[1]

    def at(self, row: Any, column: Any) -> Any:
        return self.builder.gep(self.data, [self.builder.add(self.builder.mul(row, self.row), column)])


def _load(builder: Any, pointer: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.bitcast(pointer, ir.PointerType(kind)), align=align)


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
    return builder.shuffle_vector(first, undefined, mask)


def _generate(
    context: Any, builder: Any, signature: Any, args: Any, rows: int, panels: int, add: bool
) -> Any:
    a_type, _, b_type, _, _, c_type = signature.args
    half = b_type.dtype == types.uint16
    a = _Matrix(context, builder, a_type, args[0])
    c = _Matrix(context, builder, c_type, args[5])
    b = context.make_array(b_type)(context, builder, args[2])
    first, panel, depth = args[1], args[3], args[4]
    panel_size = builder.mul(cgutils.unpack_tuple(builder, b.shape)[1], _I64(PANEL))
    a_rows = [a.at(builder.add(first, _I64(r)), _I64(0)) for r in range(rows)]
    c_rows = [c.at(builder.add(first, _I64(r)), builder.mul(panel, _I64(PANEL))) for r in range(rows)]
    b_panels = [
        builder.gep(b.data, [builder.mul(builder.add(panel, _I64(p)), panel_size)]) for p in range(panels)
    ]
    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), "llvm.fma.v8f32"
    )
    vectors = range(panels * PANEL // _LANES)
    sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in vectors] for _ in range(rows)]
    for r in range(rows):
        for v in vectors:
            start = ir.Constant(_VECTOR, [0.0] * _LANES)
            if add:
                start = _load(builder, builder.gep(c_rows[r], [_I64(v * _LANES)]), _VECTOR, 4)
            builder.store(start, sums[r][v])
    with cgutils.for_range(builder, depth) as loop:
        offset = builder.mul(loop.index, _I64(PANEL))
        loaded = []
        for v in vectors:
            pointer = builder.gep(b_panels[v // 2], [builder.add(offset, _I64(v % 2 * _LANES))])
            if half:
                loaded.append(builder.fpext(_load(builder, pointer, _HALVES, 2), _VECTOR))
            else:
                loaded.append(_load(builder, pointer, _VECTOR, 4))
        for r in range(rows):
            factor = _splat(builder, builder.load(builder.gep(a_rows[r], [loop.index]), align=4))
            for v in vectors:
                total = builder.call(multiply_add, [factor, loaded[v], builder.load(sums[r][v])])
                builder.store(total, sums[r][v])
    for r in range(rows):
        for v in vectors:
            target = builder.bitcast(builder.gep(c_rows[r], [_I64(v * _LANES)]), ir.PointerType(_VECTOR))
            builder.store(builder.load(sums[r][v]), target, align=4)
    return context.get_dummy_value()


def _tile(rows: int, panels: int, *, add: bool) -> Any:
    """An intrinsic `tile(a, i, b, p, k, c)`, for `rows` rows from i and `panels` panels from p.

    c[i:i+rows, 16p:16(p+panels)] = a[i:i+rows, :k] · b[p:p+panels, :k], or += with `add`. `a`, `c`: float32
    [·, ·]; `b`: [panels, ≥k, 16] float32, or float16 as uint16; all C-contiguous. No bounds are checked.
    """

    @intrinsic
    def tile(_typing: Any, a: Any, i: Any, b: Any, p: Any, k: Any, c: Any) -> Any:
        for kind in (a, b, c):
            if not isinstance(kind, types.Array) or kind.layout != "C":
                return None

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _generate(context, builder, signature, args, rows, panels, add)

        return types.void(a, types.int64, b, types.int64, types.int64, c), generate

    return tile


_PAIRS = ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15])
_QUADS = ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15])
_LOW_HIGH = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of eight row vectors, by interleaving pairs, then pairs of pairs, then halves."""

    def mix(x: Any, y: Any, mask: list[int]) -> Any:
        return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), _LANES), mask))

    pairs = [mix(rows[r], rows[r + 1], mask) for r in (0, 2, 4, 6) for mask in _PAIRS]
    quads = [mix(pairs[r], pairs[r + 2], mask) for r in (0, 1, 4, 5) for mask in _QUADS]
    return [mix(quads[r], quads[r + 4], mask) for mask in _LOW_HIGH for r in range(4)]


@intrinsic
def transpose_8x8(_typing: Any, source: Any, row: Any, column: Any, panels: Any) -> Any:
    """panels[row // 16, column + j, row % 16 + i] = source[row + i, column + j] for i, j < 8; float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = _Matrix(context, builder, signature.args[0], args[0])
        target = context.make_array(signature.args[3])(context, builder, args[3])
        depth = cgutils.unpack_tuple(builder, target.shape)[1]
        rows = [
            _load(builder, matrix.at(builder.add(args[1], _I64(i)), args[2]), _VECTOR, 4) for i in range(8)
        ]
        panel = builder.sdiv(args[1], _I64(PANEL))
        lane = builder.srem(args[1], _I64(PANEL))
        for j, vector in enumerate(_transposed(builder, rows)):
            line = builder.add(builder.mul(panel, depth), builder.add(args[2], _I64(j)))
            pointer = builder.gep(target.data, [builder.add(builder.mul(line, _I64(PANEL)), lane)])
            builder.store(vector, builder.bitcast(pointer, ir.PointerType(_VECTOR)), align=4)
        return context.get_dummy_value()

    return types.void(source, types.int64, types.int64, panels), generate


_set6, _set3, _set2, _set1 = (_tile(rows, 1, add=False) for rows in (6, 3, 2, 1))
_set2x2, _set1x4 = _tile(2, 2, add=False), _tile(1, 4, add=False)
_add6, _add3, _add2, _add1 = (_tile(rows, 1, add=True) for rows in (6, 3, 2, 1))


@kernel
def set_panel(a: Any, i: int, end: int, b: Any, p: int, k: int, c: Any) -> None:
    """c[i:end] = a[i:end, :k] · panel p of b."""
    while end - i >= 6:
        _set6(a, i, b, p, k, c)
        i += 6
    if end - i >= 3:
        _set3(a, i, b, p, k, c)
        i += 3
    if end - i == 2:
        _set2(a, i, b, p, k, c)
    elif end - i == 1:
        _set1(a, i, b, p, k, c)


@kernel
def add_panel(a: Any, i: int, end: int, b: Any, p: int, k: int, c: Any) -> None:
    """c[i:end] += a[i:end, :k] · panel p of b."""
    while end - i >= 6:
        _add6(a, i, b, p, k, c)
        i += 6
    if end - i >= 3:
        _add3(a, i, b, p, k, c)
        i += 3
    if end - i == 2:
        _add2(a, i, b, p, k, c)
    elif end - i == 1:
        _add1(a, i, b, p, k, c)


@kernel
def set_panels(a: Any, rows: int, b: Any, first: int, end: int, k: int, c: Any) -> None:
    """c[:rows] = a[:rows, :k] · panels [first, end) of b; one or two rows get wider tiles."""
    p = first
    if rows == 1:
        while end - p >= 4:
            _set1x4(a, 0, b, p, k, c)
            p += 4
    elif rows == 2:
        while end - p >= 2:
            _set2x2(a, 0, b, p, k, c)
            p += 2
    # 120 rows of a stay in the second-level cache while all panels pass by.
    for block in range(0, rows, 120):
        for panel in range(p, end):
            set_panel(a, block, min(rows, block + 120), b, panel, k, c)
