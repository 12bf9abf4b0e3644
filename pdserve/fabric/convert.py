"""The one way from a libfabric code to an exception."""

from __future__ import annotations

import errno

from pdserve.errors import FabricError
from pdserve.fabric._core import ffi, lib

FI_ENOSPC = errno.ENOSPC
FI_ENOTCONN = errno.ENOTCONN
FI_EBUSY = errno.EBUSY
FI_ECANCELED = errno.ECANCELED
FI_ETRUNC = 265
FI_EOPBADSTATE = 258

# rdma/fi_errno.h: codes below 256 are errno's.
_OWN_NAMES = (
    *("FI_EOTHER", "FI_ETOOSMALL", "FI_EOPBADSTATE", "FI_EAVAIL", "FI_EBADFLAGS", "FI_ENOEQ", "FI_EDOMAIN"),
    *("FI_ENOCQ", "FI_ECRC", "FI_ETRUNC", "FI_ENOKEY", "FI_ENOAV", "FI_EOVERRUN", "FI_ENORX", "FI_ENOMR"),
    "FI_EFIREWALLADDR",
)
# Where errno.errorcode picks another of two names for one number.
_ALIASES = {errno.EAGAIN: "FI_EAGAIN", errno.EOPNOTSUPP: "FI_EOPNOTSUPP"}


def code_name(code: int) -> str:
    """libfabric's name of a positive code, such as FI_ECONNRESET."""
    if code in _ALIASES:
        return _ALIASES[code]
    if code in errno.errorcode:
        return f"FI_{errno.errorcode[code]}"
    if 0 <= code - 256 < len(_OWN_NAMES):
        return _OWN_NAMES[code - 256]
    return f"FI_{code}"


def fabric_error(action: str, code: int, *, provider_code: int = 0) -> FabricError:
    """The exception for `code` (either sign) out of `action`; a differing provider code is named too."""
    code = abs(code)
    name = code_name(code)
    text = ffi.string(lib.pd_strerror(code)).decode(errors="replace")
    detail = f" ({text})" if text else ""
    if provider_code and abs(provider_code) != code:
        detail += f"; the provider said {code_name(abs(provider_code))}"
    return FabricError(f"{action}: {name}{detail}", name=name, errno=code)
