"""What a machine has: GPUs, NICs, the PCI tree over them, NUMA nodes and CPUs. Frozen facts and pure
questions.

`sysfs.read_topology` fills it in from a directory, `placement.assign` picks NICs and CPUs from it. Neither
looks anywhere else, so both are tested on trees of machines that are not at hand.

    pci0000:44            host bridge     chain[0]
      0000:44:00.0        root port       chain[1]
        0000:45:00.0      switch          chain[2]     two devices are as near as their chains are alike
          0000:46:00.0    its ports       chain[3]
            0000:4f:00.0  the device      address
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class NicKind(enum.Enum):
    """What a NIC can do, by its maker. All but ETHERNET are RDMA hardware."""

    EFA = "EFA"
    CONNECTX = "ConnectX"
    RDMA = "RDMA"
    ETHERNET = "Ethernet"


class Distance(enum.IntEnum):
    """What lies between a device and a NIC, nearest first."""

    SWITCH = 0
    """A root port or a switch below it is common: data need not pass the CPU."""
    HOST_BRIDGE = 1
    """The same root complex."""
    NUMA = 2
    SOCKET = 3
    """Another NUMA node of the same socket."""
    SYSTEM = 4
    """Another socket, or nobody knows."""

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Distance.SWITCH: "same PCI switch",
    Distance.HOST_BRIDGE: "same root complex",
    Distance.NUMA: "same NUMA node",
    Distance.SOCKET: "same socket",
    Distance.SYSTEM: "across the system",
}


@dataclass(frozen=True, slots=True)
class Pci:
    """A PCI function. address: `0000:4f:00.0`. chain: what is above it, host bridge first. numa_node: None
    where the kernel knows none. iommu_type: `DMA`, `DMA-FQ`, `identity` or "" (no IOMMU)."""

    address: str
    chain: tuple[str, ...] = ()
    numa_node: int | None = None
    driver: str = ""
    iommu_group: int | None = None
    iommu_type: str = ""

    @property
    def translated(self) -> bool:
        """Whether an IOMMU translates its DMA."""
        return self.iommu_type.startswith("DMA")


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU. device_id: of PCI, such as `0x2330` (H100 SXM)."""

    pci: Pci
    device_id: str = ""


@dataclass(frozen=True, slots=True)
class Nic:
    """A network card's function.

    name: of its RDMA device, else of its network interface, else its PCI address. rdma_device: None where no
    driver offers one. active: a port has a link. link_layer: `InfiniBand`, `Ethernet` or "". gbps: Gb/s of
    all active ports together, None where unknown.
    """

    name: str
    kind: NicKind
    pci: Pci | None = None
    rdma_device: str | None = None
    netdevs: tuple[str, ...] = ()
    active: bool = True
    link_layer: str = ""
    gbps: float | None = None

    @property
    def rdma(self) -> bool:
        """Whether the hardware can do RDMA, with or without a driver."""
        return self.kind is not NicKind.ETHERNET


@dataclass(frozen=True, slots=True)
class Cpu:
    """An online CPU that this process may use. core: the CPUs of its core, itself among them."""

    number: int
    core: tuple[int, ...]
    socket: int | None = None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """cpus: those online, whoever may use them. distances: to every node of `Topology.nodes`, in that order,
    10 to itself; () where unknown."""

    id: int
    cpus: tuple[int, ...]
    socket: int | None = None
    distances: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HugePages:
    """size: bytes of one. total, free: pages."""

    size: int
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class AcsBridge:
    """A PCI bridge above a GPU. redirects: it sends peer-to-peer traffic up to the root complex; None where
    its configuration space can't be read (only root may)."""

    address: str
    redirects: bool | None


@dataclass(frozen=True, slots=True)
class Topology:
    """One machine. Everything is sorted: GPUs and NICs by PCI address, nodes and CPUs by number.

    There is at least one node where there is a CPU: a machine without NUMA is one node. online: CPUs of the
    machine; cpus: those of them that this process may use.
    """

    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    nodes: tuple[NumaNode, ...] = ()
    cpus: tuple[Cpu, ...] = ()
    online: int = 0
    huge_pages: tuple[HugePages, ...] = ()
    iommu_groups: int = 0
    acs: tuple[AcsBridge, ...] = ()

    @property
    def rdma_nics(self) -> tuple[Nic, ...]:
        """RDMA hardware, usable or not."""
        return tuple(nic for nic in self.nics if nic.rdma)

    @property
    def usable_nics(self) -> tuple[Nic, ...]:
        """Where data should go: RDMA devices with a link; without any, network interfaces with one."""
        rdma = tuple(nic for nic in self.nics if nic.rdma_device is not None and nic.active)
        return rdma or tuple(nic for nic in self.nics if nic.netdevs and nic.active)

    def nic(self, name: str) -> Nic:
        """KeyError if there is none of this name."""
        for nic in self.nics:
            if nic.name == name:
                return nic
        raise KeyError(name)

    def socket_of(self, numa_node: int | None) -> int | None:
        return next((node.socket for node in self.nodes if node.id == numa_node), None)

    def distance(self, device: Pci | None, numa_node: int | None, nic: Nic) -> tuple[Distance, int]:
        """From a rank to a NIC: the smaller, the nearer. `device`: the rank's, None for a rank on CPUs, which
        `numa_node` places. The second item is minus the number of bridges in common: a deeper one is
        nearer."""
        other = nic.pci
        if other is None:
            return Distance.SYSTEM, 0
        if device is not None:
            common = _common(device.chain, other.chain)
            if common > 1:
                return Distance.SWITCH, -common
            if common == 1:
                return Distance.HOST_BRIDGE, 0
        if numa_node is not None and numa_node == other.numa_node:
            return Distance.NUMA, 0
        socket = self.socket_of(numa_node)
        if socket is not None and socket == self.socket_of(other.numa_node):
            return Distance.SOCKET, 0
        return Distance.SYSTEM, 0


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
