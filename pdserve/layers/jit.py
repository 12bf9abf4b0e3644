"""How kernels are compiled: numba, with multiply-add contracted and nothing else reordered.

`contract` is the only liberty the compiler gets. It may fuse a multiply and an add; it may not reassociate a
sum. So the bits of a result follow from the source alone, whichever loop (vector body or remainder) ran it.

Machine code is kept on disk under a directory named by a hash of this package's sources, because numba itself
only notices a change in the file a kernel is written in, not in the functions it inlines.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic as _intrinsic

from pdserve.config.environment import cache_directory

F = TypeVar("F", bound=Callable[..., Any])

intrinsic: Any = _intrinsic
"""numba's, untyped: its stubs count the typing context among the arguments of a call."""

_njit: Any = numba.njit
_CONFIG: Any = numba.config
_OPTIONS: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy", "nogil": True}


def _cache_directory() -> Path | None:
    """The first that can be written of: numba's own setting, our `__pycache__`, the user's cache."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    digest = hashlib.blake2b(b"".join(source.read_bytes() for source in sources), digest_size=6).hexdigest()
    bases = [Path(__file__).parent / "__pycache__", cache_directory()]
    if _CONFIG.CACHE_DIR:
        bases.insert(0, Path(_CONFIG.CACHE_DIR))
    for base in bases:
        directory = base / f"kernels-{digest}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(directory, os.W_OK | os.X_OK):
            return directory
    return None


_DIRECTORY = _cache_directory()
if _CONFIG.THREADING_LAYER == "default":
    # The one that sleeps: OpenMP's threads spin at each barrier, 30 ms a call on a machine that is also busy
    # otherwise.
    _CONFIG.THREADING_LAYER = "workqueue"
if _DIRECTORY is not None:
    _CONFIG.CACHE_DIR = str(_DIRECTORY)


def kernel(function: F) -> F:
    """Compile on first call. Where no cache directory can be written, every process compiles anew."""
    return _compile(function, parallel=False)


def parallel_kernel(function: F) -> F:
    """`kernel` with its `prange` loops on numba's threads. (One function can't be both: numba's cache would
    hand out whichever was compiled first.)"""
    return _compile(function, parallel=True)


def _compile(function: F, *, parallel: bool) -> F:
    if _DIRECTORY is not None:
        try:
            compiled: F = _njit(cache=True, parallel=parallel, **_OPTIONS)(function)
            return compiled
        except RuntimeError:  # "cannot cache function: no locator available"
            pass
    uncached: F = _njit(parallel=parallel, **_OPTIONS)(function)
    return uncached


@intrinsic
def power_of_two(_typing: Any, exponent: Any) -> Any:
    """2**exponent for a float32 that holds an integer in [-126, 127]: its bits are put together directly."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        whole = builder.fptosi(args[0], ir.IntType(32))
        bits = builder.shl(builder.add(whole, whole.type(127)), whole.type(23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.float32), generate


@intrinsic
def as_float(_typing: Any, stored: Any) -> Any:
    """A stored element as float32: itself, or a float16 kept as uint16 (numba has no float16 on a CPU)."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if stored == types.float32:
            return args[0]
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(stored), generate


@intrinsic
def as_stored(_typing: Any, like: Any, value: Any) -> Any:
    """`value` (float32) as an element of the type of `like`: itself, or rounded to float16 kept as uint16."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[1]
        return builder.bitcast(builder.fptrunc(args[1], ir.HalfType()), ir.IntType(16))

    return like(like, types.float32), generate
