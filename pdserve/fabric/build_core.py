"""Build recipe of `pdserve.fabric._core`, the C core behind the fabric binding.

Build in place, from the root of the source tree:

    python pdserve/fabric/build_core.py

`pip install` builds the same module through `cffi_modules` in setup.py. Needs a C compiler and
libfabric's headers (`libfabric-dev`); the library itself is looked up when a fabric is opened, never linked.
The module keeps to Python's stable ABI, so one binary serves every supported Python.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cffi import FFI

ROOT = Path(os.path.abspath(__file__)).parents[2]
CSRC = ROOT / "pdserve" / "fabric" / "csrc"
CDEF = re.compile(r"/\* cdef: begin \*/(.*?)/\* cdef: end \*/", re.S)


def _declarations() -> str:
    """The part of api.h that Python sees; one text serves the C compiler and cffi."""
    found = CDEF.findall((CSRC / "api.h").read_text())
    if not found:
        raise RuntimeError(f"{CSRC / 'api.h'} has no cdef section")
    return "\n".join(found)


def _builder() -> FFI:
    ffi = FFI()
    ffi.cdef(_declarations())
    ffi.set_source(
        "pdserve.fabric._core",
        '#include "api.h"',
        # Relative to the root: setuptools refuses absolute paths.
        sources=sorted(path.relative_to(ROOT).as_posix() for path in CSRC.glob("*.c")),
        depends=sorted(path.relative_to(ROOT).as_posix() for path in CSRC.glob("*.h")),
        include_dirs=["pdserve/fabric/csrc"],
        libraries=["dl", "pthread"],
        extra_compile_args=["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-fvisibility=hidden"],
    )
    return ffi


ffibuilder = _builder()


def _build_in_place() -> None:
    from setuptools import Distribution

    os.chdir(ROOT)
    distribution = Distribution(
        {"name": "pdserve", "cffi_modules": [f"{Path(__file__).resolve()}:ffibuilder"]}
    )
    build = distribution.get_command_obj("build_ext")
    build.inplace = True
    distribution.run_command("build_ext")


if __name__ == "__main__":
    _build_in_place()
