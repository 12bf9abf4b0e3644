"""What a node says of its network when it starts: the path it has chosen, how fast that is, what it leaves
unused.

A node that falls back to TCP beside idle RDMA hardware works, a hundred times slower; nobody should have to
find that out from a latency graph.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path

from pdserve.errors import FabricError
from pdserve.fabric import Fabric, ProviderInfo, Topology, read_topology
from pdserve.fabric.measure import open_path
from pdserve.fabric.topology import Nic

log = logging.getLogger(__name__)

SYSFS = Path("/sys")
PAGE = 65536
SECONDS = 0.1

_RDMA_PROVIDERS = frozenset({"efa", "efa-direct", "verbs"})


def this_machine(sysfs: Path = SYSFS) -> Topology:
    """The topology of this machine, with the CPUs this process may use. Blocks: some 10 ms on a large one.

    `sysfs`: another machine's tree, of which any CPU may be used.
    """
    return read_topology(sysfs, allowed=os.sched_getaffinity(0) if sysfs == SYSFS else None)


async def self_test(fabric: Fabric, topology: Topology, *, measure: bool = True) -> float | None:
    """Log the path that `fabric` is and, with `measure`, its GB/s over loopback (some 0.15 s); warn of RDMA
    hardware that lies idle. `fabric.run()` must be running. Returns the speed.

    Never raises FabricError: a path that fails with itself may work with others, and a hello will tell.
    """
    gbs = None
    speed = "not measured"
    if measure:
        try:
            async with open_path(fabric, fabric) as path:
                gbs = await path.bandwidth(PAGE, SECONDS)
            speed = f"{gbs:.2f} GB/s in pages of {PAGE >> 10} KiB with itself"
        except FabricError as error:
            log.error("the self-test of the fabric failed: %s", error)
            speed = "failed its self-test"
    log.info("fabric: %s, %s", describe(fabric.info), speed)
    idle = idle_rdma(topology, fabric.info.provider)
    if idle is not None:
        log.warning("%s", idle)
    return gbs


def describe(info: ProviderInfo) -> str:
    """A path in a few words."""
    return f"{info.provider} on {info.domain} by libfabric {info.version} ({info.path}), mode {info.mode}"


def idle_rdma(topology: Topology, provider: str) -> str | None:
    """The sentence on RDMA hardware that `provider` leaves unused; None where there is none, or it is
    used."""
    nics = topology.rdma_nics
    if not nics or provider.partition(";")[0] in _RDMA_PROVIDERS:
        return None
    return (
        f"RDMA hardware is present but unused: {kinds(nics)} ({names(nics)}), while KV cache goes over "
        f"{provider!r}, which is many times slower (fabric.provider)"
    )


def kinds(nics: tuple[Nic, ...]) -> str:
    """Such as "32 EFA, 1 ConnectX"."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(nic.kind.value for nic in nics).items())


def names(nics: tuple[Nic, ...], most: int = 4) -> str:
    """The first names, and how many more there are."""
    rest = f" and {len(nics) - most} more" if len(nics) > most else ""
    return ", ".join(nic.name for nic in nics[:most]) + rest
