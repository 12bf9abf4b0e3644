"""Four machines: what their sysfs says that matters here, in as few words as will do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.fabric.topology.tree import Sysfs

DISPLAY, ETHERNET, INFINIBAND = 0x030200, 0x020000, 0x020700


def p5_48xlarge(root: Path) -> Path:
    """AWS p5.48xlarge: 8 H100 and 32 EFA NICs, four beside each GPU below one switch; 2 sockets of 48
    cores."""
    machine = Sysfs(root)
    machine.cpus(sockets=2, cores=48, threads=2)
    machine.node(0, "0-47,96-143", "10 21")
    machine.node(1, "48-95,144-191", "21 10")
    machine.huge_pages(2048, 5128, 5128)
    for gpu in range(8):
        bus, node = 0x44 + 0x11 * gpu, gpu // 4
        switch = (f"pci0000:{bus:02x}", f"0000:{bus:02x}:00.0", f"0000:{bus + 1:02x}:00.0")
        for slot in range(5):  # four NICs, then the GPU
            address = bus + 0x0B + slot
            port = machine.bridges(*switch, f"0000:{bus + 2:02x}:{slot:02x}.0", node=node)
            function = f"{port}/0000:{address:02x}:00.0"
            if slot == 4:
                machine.pci(function, "10de:2330", DISPLAY, node=node, driver="nvidia")
                continue
            folder = machine.pci(function, "1d0f:efa2", ETHERNET, node=node, driver="efa")
            machine.rdma(folder, f"rdmap{address}s0", layer="Unspecified", gbps=100)
    ena = machine.pci("pci0000:40/0000:40:05.0", "1d0f:ec20", ETHERNET, node=0, driver="ena")
    machine.netdev(ena, "ens32")
    machine.netdev("", "lo", state="unknown")
    return root


_DGX_PAIRS = (
    (0x1B, 0x18, 0),
    (0x43, 0x40, 3),
    (0x52, 0x4F, 4),
    (0x61, 0x5E, 5),
    (0x9D, 0x9A, 6),
    (0xC3, 0xC0, 9),
    (0xD1, 0xCE, 10),
    (0xDF, 0xDC, 11),
)
"""Buses of a GPU and of its NIC, and the number of that NIC's device."""


def dgx_h100(root: Path) -> Path:
    """DGX H100: 8 H100, each with a ConnectX-7 behind its switch; two dual-port ConnectX-7 for storage, on
    root ports of their own; 2 sockets of 56 cores. Bare metal: an IOMMU passes through, switches redirect
    nothing."""
    machine = Sysfs(root)
    machine.cpus(sockets=2, cores=56, threads=2)
    machine.node(0, "0-55,112-167", "10 21")
    machine.node(1, "56-111,168-223", "21 10")
    machine.huge_pages(2048, 0, 0)
    for index, (gpu, nic, number) in enumerate(_DGX_PAIRS):
        bus, node = nic - 3, index // 4
        switch = (f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0")
        ports = [machine.bridges(*switch, f"0000:{bus + 2:02x}:{slot:02x}.0", node=node) for slot in range(2)]
        folder = machine.pci(
            f"{ports[0]}/0000:{nic:02x}:00.0",
            "15b3:1021",
            INFINIBAND,
            node=node,
            driver="mlx5_core",
            iommu=(2 * index, "identity"),
        )
        machine.rdma(folder, f"mlx5_{number}")
        machine.netdev(folder, f"ibp{nic}s0")
        machine.pci(
            f"{ports[1]}/0000:{gpu:02x}:00.0",
            "10de:2330",
            DISPLAY,
            node=node,
            driver="nvidia",
            iommu=(2 * index + 1, "identity"),
        )
    for bus, node, first in ((0x29, 0, 1), (0xAA, 1, 7)):
        port = machine.bridges(f"pci0000:{bus - 1:02x}", f"0000:{bus - 1:02x}:01.0", node=node)
        for function in range(2):
            folder = machine.pci(
                f"{port}/0000:{bus:02x}:00.{function}", "15b3:1021", ETHERNET, node=node, driver="mlx5_core"
            )
            machine.rdma(folder, f"mlx5_{first + function}", layer="Ethernet", gbps=200)
            machine.netdev(folder, f"enp{bus}s0f{function}np{function}", speed=200_000)
    return root


def dual_socket(root: Path) -> Path:
    """Two sockets of 16 cores without second threads, no GPU, a ConnectX-5 on each."""
    machine = Sysfs(root)
    machine.cpus(sockets=2, cores=16)
    machine.node(0, "0-15", "10 21")
    machine.node(1, "16-31", "21 10")
    machine.huge_pages(2048, 0, 0)
    machine.huge_pages(1 << 20, 0, 0)
    for number, (bus, node) in enumerate(((0x3B, 0), (0xAF, 1))):
        port = machine.bridges(f"pci0000:{bus - 1:02x}", f"0000:{bus - 1:02x}:00.0", node=node)
        folder = machine.pci(
            f"{port}/0000:{bus:02x}:00.0", "15b3:1017", ETHERNET, node=node, driver="mlx5_core"
        )
        machine.rdma(folder, f"mlx5_{number}", layer="Ethernet", gbps=100)
        machine.netdev(folder, f"enp{bus}s0", speed=100_000)
    machine.netdev("", "lo", state="unknown")
    return root


def virtual_machine(root: Path) -> Path:
    """A VM of 2 CPUs: one virtio NIC, no NUMA directory, no GPU, no IOMMU."""
    machine = Sysfs(root)
    machine.cpus(sockets=1, cores=2)
    machine.huge_pages(2048, 0, 0)
    machine.pci("pci0000:00/0000:00:00.0", "8086:0d57", 0x060000)
    function = machine.pci("pci0000:00/0000:00:03.0", "1af4:1041", ETHERNET, driver="virtio-pci")
    (root / function / "virtio2").mkdir()
    machine.netdev(f"{function}/virtio2", "eth0")
    machine.netdev("", "lo", state="unknown")
    machine.netdev("", "ifb0", state="down")
    return root


MACHINES: dict[str, Callable[[Path], Path]] = {
    "p5.48xlarge": p5_48xlarge,
    "DGX H100": dgx_h100,
    "dual socket": dual_socket,
    "virtual machine": virtual_machine,
}
