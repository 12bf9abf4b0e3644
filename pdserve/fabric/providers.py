"""What the loaded libfabric could do on this machine, before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.fabric import library
from pdserve.fabric._core import ffi, lib
from pdserve.fabric.convert import fabric_error

_ENDPOINTS = {1: "MSG", 2: "DGRAM", 3: "RDM"}
_MAX_OFFERS = 4096
_FI_MSG, _FI_RMA = 1 << 1, 1 << 2  # rdma/fabric.h


@dataclass(frozen=True, slots=True)
class Offer:
    """One entry of fi_getinfo(3). domain: the device, such as `eth0` or `rdmap79s0-rdm`. endpoint: `RDM`,
    `MSG` or `DGRAM`. version: the provider's own, as "2.5.1". fits: it has messages, one-sided writes and 4
    bytes of remote CQ data, which is what a fabric needs of an RDM endpoint."""

    provider: str
    fabric: str
    domain: str
    endpoint: str
    version: str
    fits: bool


def providers(path: str | None = None) -> tuple[Offer, ...]:
    """Everything libfabric offers, in its own order of preference, each once.

    Loads libfabric as `library.load(path)` does. Blocks while all providers look for their devices: some 20
    ms, up to a second with old builds. FabricError where it can't be loaded or asked.
    """
    library.load(path)
    found = ffi.new("pd_offer[]", _MAX_OFFERS)
    count = lib.pd_library_offers(found, _MAX_OFFERS)
    if count < 0:
        raise fabric_error("fi_getinfo", count)
    offers = (_offer(found[index]) for index in range(min(count, _MAX_OFFERS)))
    return tuple(dict.fromkeys(offers))


def _offer(entry: _Entry) -> Offer:
    def text(field: object) -> str:
        return str(ffi.string(field).decode(errors="replace"))

    needed = _FI_MSG | _FI_RMA
    return Offer(
        text(entry.provider),
        text(entry.fabric),
        text(entry.domain),
        _ENDPOINTS.get(entry.endpoint, str(entry.endpoint)),
        _version(entry.version >> 16, entry.version & 0xFFFF),
        entry.capabilities & needed == needed and entry.cq_data_size >= 4,
    )


def _version(major: int, minor: int) -> str:
    """Providers that come with libfabric pack its 2.5.1 as 205.10."""
    return f"{major // 100}.{major % 100}.{minor // 10}" if major >= 100 else f"{major}.{minor}"


class _Entry:
    """The shape of a native pd_offer, for the type checker."""

    provider: object
    fabric: object
    domain: object
    endpoint: int
    version: int
    capabilities: int
    cq_data_size: int
