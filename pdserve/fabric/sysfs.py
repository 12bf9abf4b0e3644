"""Reading a machine's topology out of sysfs, or out of a directory that looks like it.

sysfs is what drivers make of it: files are missing, empty, unreadable or hold -1. Nothing of that is an
error: what can't be read is not known, and what can't be understood is left out. Where each file comes from:
Documentation/ABI/{stable,testing}/sysfs-* of the Linux kernel.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from pdserve.fabric.topology import (
    AcsBridge,
    Cpu,
    Gpu,
    HugePages,
    Nic,
    NicKind,
    NumaNode,
    Pci,
    Topology,
)

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_FUNCTION = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_MAX_TEXT = 1 << 16
_MAX_CPU = 1 << 16

_NVIDIA, _MELLANOX, _AMAZON = 0x10DE, 0x15B3, 0x1D0F
_VGA, _3D = 0x0300, 0x0302
_ACS = 0x000D
_REDIRECT = 0x000C  # P2P Request Redirect and P2P Completion Redirect, PCI Express Base Specification 7.7.8


def read_topology(root: Path, *, allowed: Iterable[int] | None = None) -> Topology:
    """The machine whose sysfs is mounted at `root` (on a live one, /sys). Never raises for what is in it.

    allowed: CPUs this process may use (`os.sched_getaffinity`, which also knows of cpusets), None for all.
    Blocks: some 10 ms on a large machine.
    """
    return _Reader(root).topology(None if allowed is None else frozenset(allowed))


def parse_cpulist(text: str) -> tuple[int, ...]:
    """CPU numbers of the kernel's list format ("0-3,8"), ascending; parts that make no sense are left out."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        if match is None:
            continue
        first = int(match[1])
        last = int(match[2] or first)
        if last < _MAX_CPU:
            found.update(range(first, last + 1))
    return tuple(sorted(found))


def acs_redirects(config: bytes) -> bool | None:
    """Whether a bridge with this PCI configuration space redirects peer-to-peer traffic to the root complex.
    None where the extended space, which has the answer, is missing: unprivileged readers get 64 bytes of
    4,096."""
    if len(config) < 0x104:
        return None
    at = 0x100
    for _ in range(64):  # a list in hardware may have a loop
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            return bool(int.from_bytes(config[at + 6 : at + 8], "little") & _REDIRECT)
        at = header >> 20
        if at < 0x100 or at + 8 > len(config):
            break
    return False


class _Reader:
    """One reading. Paths that lead out of `root` are taken as missing."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))
        self._only_node: int | None = None

    def topology(self, allowed: frozenset[int] | None) -> Topology:
        online = self._online()
        nodes = self._nodes(online)
        self._only_node = nodes[0].id if len(nodes) == 1 else None
        gpus, cards = self._pci_devices()
        nics = self._nics(cards)
        return Topology(
            gpus=gpus,
            nics=nics,
            nodes=nodes,
            cpus=tuple(self._cpu(cpu, online) for cpu in online if allowed is None or cpu in allowed),
            online=len(online),
            huge_pages=self._huge_pages(),
            iommu_groups=len(self._list("kernel/iommu_groups")),
            acs=self._acs(gpus),
        )

    # ---- CPUs and memory ----

    def _online(self) -> tuple[int, ...]:
        listed = parse_cpulist(self._text("devices/system/cpu/online"))
        numbers = sorted(
            int(name[3:]) for name in self._list("devices/system/cpu") if re.fullmatch(r"cpu[0-9]{1,5}", name)
        )
        # A CPU that can't be switched off has no `online` of its own.
        return listed or tuple(
            n for n in numbers if self._text(f"devices/system/cpu/cpu{n}/online").strip() != "0"
        )

    def _cpu(self, number: int, online: tuple[int, ...]) -> Cpu:
        folder = f"devices/system/cpu/cpu{number}/topology"
        siblings = parse_cpulist(
            self._text(f"{folder}/core_cpus_list") or self._text(f"{folder}/thread_siblings_list")
        )
        core = tuple(cpu for cpu in siblings if cpu in online)
        return Cpu(number, core if number in core else (number,), self._socket(number))

    def _socket(self, cpu: int) -> int | None:
        return self._natural(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id")

    def _nodes(self, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
        names = [name for name in self._list("devices/system/node") if re.fullmatch(r"node[0-9]{1,5}", name)]
        ids = sorted(int(name[4:]) for name in names)
        nodes = []
        for number in ids:
            folder = f"devices/system/node/node{number}"
            cpus = tuple(cpu for cpu in parse_cpulist(self._text(f"{folder}/cpulist")) if cpu in online)
            words = self._text(f"{folder}/distance").split()
            distances = tuple(int(word) for word in words if word.isascii() and word.isdigit())
            socket = self._socket(cpus[0]) if cpus else None
            nodes.append(NumaNode(number, cpus, socket, distances if len(distances) == len(ids) else ()))
        if any(node.cpus for node in nodes):
            return tuple(nodes)
        return (NumaNode(0, online, self._socket(online[0])),) if online else ()

    def _huge_pages(self) -> tuple[HugePages, ...]:
        found = []
        for name in self._list("kernel/mm/hugepages"):
            match = re.fullmatch(r"hugepages-([0-9]{1,12})kB", name)
            if match is not None:
                total, free = (
                    self._natural(f"kernel/mm/hugepages/{name}/{what}_hugepages") or 0
                    for what in ("nr", "free")
                )
                found.append(HugePages(int(match[1]) << 10, total, free))
        return tuple(sorted(found, key=lambda pages: pages.size))

    # ---- devices ----

    def _pci_devices(self) -> tuple[tuple[Gpu, ...], dict[str, tuple[NicKind, Pci]]]:
        """GPUs, and cards that can do RDMA by their address (whether or not a driver says so)."""
        gpus, cards = [], {}
        for name in self._list("bus/pci/devices"):
            folder = f"bus/pci/devices/{name}"
            vendor, kind = self._hex(f"{folder}/vendor"), self._hex(f"{folder}/class") >> 8
            device = self._hex(f"{folder}/device")
            gpu = vendor == _NVIDIA and kind in (_VGA, _3D)
            nic = _kind(vendor, device) if kind >> 8 == 0x02 else None
            if not gpu and nic is None:
                continue
            pci = self._pci(folder)
            if pci is None:
                continue
            if nic is not None:
                cards[pci.address] = (nic, pci)
            else:
                gpus.append(Gpu(pci, f"{device:#06x}" if device else ""))
        return tuple(sorted(gpus, key=lambda gpu: gpu.pci.address)), cards

    def _nics(self, cards: dict[str, tuple[NicKind, Pci]]) -> tuple[Nic, ...]:
        netdevs = self._netdevs()
        nics: list[Nic] = []
        seen: set[str] = set()
        for name in self._list("class/infiniband"):
            pci = self._pci(f"class/infiniband/{name}/device")
            if pci is None:
                continue  # software RDMA over a network interface: no hardware of its own
            kind = cards[pci.address][0] if pci.address in cards else NicKind.RDMA
            seen.add(pci.address)
            behind = tuple(n for n, other in netdevs if other is not None and other.address == pci.address)
            nics.append(self._rdma_nic(name, kind, pci, behind))
        # Cards whose driver offers no RDMA device are there all the same: someone should know.
        for address, (kind, pci) in cards.items():
            if address not in seen:
                behind = tuple(n for n, other in netdevs if other is not None and other.address == address)
                up = any(self._is_up(name) for name in behind)
                nics.append(Nic(behind[0] if behind else address, kind, pci, None, behind, up))
                seen.add(address)
        for name, pci in netdevs:
            if pci is None or pci.address not in seen:
                speed = self._natural(f"class/net/{name}/speed")
                gbps = speed / 1000 if speed else None
                nics.append(
                    Nic(name, NicKind.ETHERNET, pci, None, (name,), self._is_up(name), "Ethernet", gbps)
                )
        return tuple(sorted(nics, key=lambda nic: (nic.pci.address if nic.pci else "~", nic.name)))

    def _rdma_nic(self, name: str, kind: NicKind, pci: Pci, netdevs: tuple[str, ...]) -> Nic:
        folder = f"class/infiniband/{name}/ports"
        ports = [f"{folder}/{port}" for port in self._list(folder)]
        # "4: ACTIVE"; a port without a state that can be read gets the benefit of the doubt.
        active = [port for port in ports if self._text(f"{port}/state").strip()[:1] in ("4", "")]
        rates = [match for port in active if (match := _RATE.match(self._text(f"{port}/rate")))]
        layers = [self._text(f"{port}/link_layer").strip() for port in active or ports]
        return Nic(
            name,
            kind,
            pci,
            name,
            netdevs,
            active=bool(active) or not ports,
            link_layer=next((layer for layer in layers if layer in ("InfiniBand", "Ethernet")), ""),
            gbps=sum(float(match[1]) for match in rates) if rates else None,
        )

    def _netdevs(self) -> list[tuple[str, Pci | None]]:
        """Network interfaces of hardware: virtual ones have no device."""
        return [
            (name, self._pci(f"class/net/{name}/device"))
            for name in self._list("class/net")
            if self._real(f"class/net/{name}/device") is not None
        ]

    def _is_up(self, netdev: str) -> bool:
        return self._text(f"class/net/{netdev}/operstate").strip() in ("up", "unknown")

    def _pci(self, link: str) -> Pci | None:
        """The PCI function a path leads to or through (a virtio device is one step below its function)."""
        path = self._real(link)
        if path is None:
            return None
        parts = path.parts
        at = max((i for i, part in enumerate(parts) if _FUNCTION.fullmatch(part)), default=None)
        if at is None:
            return None
        chain = tuple(
            part for part in parts[:at] if _HOST_BRIDGE.fullmatch(part) or _FUNCTION.fullmatch(part)
        )
        folder = os.path.relpath(Path(*parts[: at + 1]), self._root)
        group = self._real(f"{folder}/iommu_group")
        number = int(group.name) if group is not None and re.fullmatch("[0-9]{1,9}", group.name) else None
        driver = self._real(f"{folder}/driver")
        numa_node = self._natural(f"{folder}/numa_node")
        return Pci(
            parts[at],
            chain,
            self._only_node if numa_node is None else numa_node,
            driver.name if driver is not None else "",
            number,
            "" if number is None else self._text(f"kernel/iommu_groups/{number}/type").strip(),
        )

    def _acs(self, gpus: tuple[Gpu, ...]) -> tuple[AcsBridge, ...]:
        bridges = sorted({part for gpu in gpus for part in gpu.pci.chain if _FUNCTION.fullmatch(part)})
        return tuple(
            AcsBridge(name, acs_redirects(self._bytes(f"bus/pci/devices/{name}/config"))) for name in bridges
        )

    # ---- files ----

    def _real(self, path: str) -> Path | None:
        """Where a path leads, links resolved; None if that is nowhere, or outside."""
        try:
            real = Path(os.path.realpath(self._root / path, strict=True))
        except (OSError, ValueError):
            return None
        return real if real.is_relative_to(self._root) else None

    def _list(self, path: str) -> list[str]:
        real = self._real(path)
        try:
            return sorted(os.listdir(real)) if real is not None else []
        except OSError:
            return []

    def _bytes(self, path: str) -> bytes:
        real = self._real(path)
        if real is None:
            return b""
        try:
            # Looked at before it is opened: to open a pipe for reading may take for ever.
            if not stat.S_ISREG(os.stat(real).st_mode):
                return b""
            with real.open("rb") as file:
                return file.read(_MAX_TEXT)
        except OSError:
            return b""

    def _text(self, path: str) -> str:
        return self._bytes(path).decode(errors="replace")

    def _natural(self, path: str) -> int | None:
        """A number from 0, None for -1 and for what is none."""
        text = self._text(path).strip()
        return int(text) if re.fullmatch("[0-9]{1,18}", text) else None

    def _hex(self, path: str) -> int:
        text = self._text(path).strip()
        return int(text, 16) if re.fullmatch("0x[0-9a-fA-F]{1,8}", text) else 0


def _kind(vendor: int, device: int) -> NicKind | None:
    if vendor == _AMAZON and device >> 4 == 0xEFA:
        return NicKind.EFA
    return NicKind.CONNECTX if vendor == _MELLANOX else None
