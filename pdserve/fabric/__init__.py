"""A libfabric binding for asyncio: messages, one-sided writes with counted immediates, and ports that fence.

Knows nothing of models or requests. libfabric itself is loaded by `Fabric.open`, not by importing this.

    async with Fabric.open(FabricConfig(host="127.0.0.1")) as fabric, asyncio.TaskGroup() as tasks:
        pump = tasks.create_task(fabric.run(), name="fabric")
        port = await fabric.open_port(counters, name="peer", on_message=..., on_lost=...)
        region = port.register(arena)           # tell the peer port.address and region.remote
        port.connect(peer_address)
        await port.write_pages(region, peer_region, table)
        await port.close()                      # a fence: nothing lands after this
        pump.cancel()
"""

from pdserve.errors import FabricError
from pdserve.fabric.atomics import SharedCounter, load_acquire, store_release
from pdserve.fabric.batch import WriteBatch
from pdserve.fabric.config import FabricConfig, ProviderInfo
from pdserve.fabric.fabric import Fabric, native_handles, open_handles
from pdserve.fabric.imm import NO_IMM, Imm, ImmCounters, pack_imm, unpack_imm
from pdserve.fabric.placement import RankPlacement, assign
from pdserve.fabric.port import Port
from pdserve.fabric.region import MemoryRegion, RemoteRegion
from pdserve.fabric.sysfs import read_topology
from pdserve.fabric.table import WriteTable
from pdserve.fabric.topology import Topology

__all__ = [
    "NO_IMM",
    "Fabric",
    "FabricConfig",
    "FabricError",
    "Imm",
    "ImmCounters",
    "MemoryRegion",
    "Port",
    "ProviderInfo",
    "RankPlacement",
    "RemoteRegion",
    "SharedCounter",
    "Topology",
    "WriteBatch",
    "WriteTable",
    "assign",
    "load_acquire",
    "native_handles",
    "open_handles",
    "pack_imm",
    "read_topology",
    "store_release",
    "unpack_imm",
]
