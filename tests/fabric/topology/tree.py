"""A directory that looks like sysfs, made file by file, with links as the kernel has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def config_space(*, redirect: bool | None) -> bytes:
    """PCI configuration space of a bridge: an error-reporting capability, then an ACS one, redirecting or
    not; None: what an unprivileged reader gets."""
    if redirect is None:
        return bytes(64)
    space = bytearray(4096)
    space[0x100:0x104] = (0x148 << 20 | 1 << 16 | 0x0001).to_bytes(4, "little")
    space[0x148:0x14C] = (0x000 << 20 | 1 << 16 | 0x000D).to_bytes(4, "little")
    space[0x14E:0x150] = (0x001D if redirect else 0x0001).to_bytes(2, "little")
    return bytes(space)


class Sysfs:
    """Writes one machine under `root`. Nothing is checked: what is described is what is there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("bus/pci/devices", "class/net", "devices/system/cpu", "kernel/iommu_groups"):
            (root / folder).mkdir(parents=True)

    def file(self, path: str, content: str | bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())

    def link(self, path: str, target: str) -> None:
        """A relative link at `path` to `target`, both from the root."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target, place.parent))

    # ---- CPUs and memory ----

    def cpus(self, *, sockets: int, cores: int, threads: int = 1, offline: Sequence[int] = ()) -> None:
        """`cores` a socket; numbers go over all cores first and then over their second threads."""
        total = sockets * cores
        numbers = range(total * threads)
        online = [n for n in numbers if n not in offline]
        self.file("devices/system/cpu/online", ",".join(map(str, online)))
        for n in numbers:
            folder = f"devices/system/cpu/cpu{n}"
            (self.root / folder).mkdir()
            if n:
                self.file(f"{folder}/online", str(int(n in online)))
            if n in online:
                core = [n % total + thread * total for thread in range(threads)]
                siblings = ",".join(str(cpu) for cpu in core if cpu in online)
                self.file(f"{folder}/topology/physical_package_id", str(n % total // cores))
                self.file(f"{folder}/topology/thread_siblings_list", siblings)
                self.file(f"{folder}/topology/core_cpus_list", siblings)

    def node(self, number: int, cpulist: str, distances: str) -> None:
        self.file(f"devices/system/node/node{number}/cpulist", cpulist)
        self.file(f"devices/system/node/node{number}/distance", distances)

    def huge_pages(self, kib: int, total: int, free: int) -> None:
        self.file(f"kernel/mm/hugepages/hugepages-{kib}kB/nr_hugepages", str(total))
        self.file(f"kernel/mm/hugepages/hugepages-{kib}kB/free_hugepages", str(free))

    # ---- devices ----

    def pci(
        self,
        path: str,
        ids: str,
        kind: int,
        *,
        node: int = -1,
        driver: str = "",
        iommu: tuple[int, str] | None = None,
        config: bytes = b"",
    ) -> str:
        """A function at `path` ("pci0000:15/0000:15:01.0"), vendor and device as "10de:2330". Returns its
        folder."""
        folder = f"devices/{path}"
        address = path.rpartition("/")[2]
        vendor, device = ids.split(":")
        facts = {"vendor": f"0x{vendor}", "device": f"0x{device}", "class": f"0x{kind:06x}"}
        for name, text in {**facts, "numa_node": str(node)}.items():
            self.file(f"{folder}/{name}", text)
        self.file(f"{folder}/config", config or config_space(redirect=None))
        self.link(f"bus/pci/devices/{address}", folder)
        if driver:
            (self.root / f"bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.link(f"{folder}/driver", f"bus/pci/drivers/{driver}")
        if iommu is not None:
            number, kind_of = iommu
            self.file(f"kernel/iommu_groups/{number}/type", kind_of)
            self.link(f"{folder}/iommu_group", f"kernel/iommu_groups/{number}")
        return folder

    def bridges(self, *path: str, node: int = -1, redirect: bool | None = False) -> str:
        """A host bridge and the bridges below it, those that are missing; returns the path of the last
        one."""
        for depth in range(2, len(path) + 1):
            here = "/".join(path[:depth])
            if not (self.root / "devices" / here).exists():
                self.pci(here, "1000:c030", 0x060400, node=node, config=config_space(redirect=redirect))
        return "/".join(path)

    def rdma(
        self, folder: str, name: str, *, layer: str = "InfiniBand", gbps: int = 400, state: str = "4: ACTIVE"
    ) -> None:
        """An RDMA device on the function in `folder`."""
        here = f"{folder}/infiniband/{name}"
        for file, text in {
            "state": state,
            "link_layer": layer,
            "rate": f"{gbps} Gb/sec (4X NDR)",
            "phys_state": "5: LinkUp",
        }.items():
            self.file(f"{here}/ports/1/{file}", text)
        self.link(f"{here}/device", folder)
        self.link(f"class/infiniband/{name}", here)

    def netdev(self, folder: str, name: str, *, state: str = "up", speed: int = -1) -> None:
        """A network interface on the device in `folder`; "" for a virtual one."""
        here = f"{folder or 'devices/virtual'}/net/{name}"
        self.file(f"{here}/operstate", state)
        self.file(f"{here}/speed", str(speed))
        if folder:
            self.link(f"{here}/device", folder)
        self.link(f"class/net/{name}", here)
