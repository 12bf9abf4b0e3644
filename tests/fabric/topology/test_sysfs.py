"""Reading sysfs: what four machines have, and that nothing in a tree can make reading fail."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.fabric import Topology, assign, read_topology
from pdserve.fabric.sysfs import acs_redirects, parse_cpulist
from pdserve.fabric.topology import Distance, NicKind
from tests.fabric.topology.conftest import Machine
from tests.fabric.topology.machines import MACHINES, dual_socket, virtual_machine
from tests.fabric.topology.tree import Sysfs, config_space


def test_p5(machine: Machine) -> None:
    p5 = machine("p5.48xlarge")
    assert [gpu.pci.address for gpu in p5.gpus[:2]] == ["0000:53:00.0", "0000:64:00.0"]
    assert {gpu.device_id for gpu in p5.gpus} == {"0x2330"}
    assert [gpu.pci.numa_node for gpu in p5.gpus] == [0] * 4 + [1] * 4
    assert len(p5.rdma_nics) == len(p5.usable_nics) == 32
    assert {(nic.kind, nic.gbps, nic.netdevs) for nic in p5.usable_nics} == {(NicKind.EFA, 100.0, ())}
    assert [nic.name for nic in p5.nics if not nic.rdma] == ["ens32"]
    first = p5.gpus[0].pci
    assert first.chain == ("pci0000:44", "0000:44:00.0", "0000:45:00.0", "0000:46:04.0")
    assert p5.distance(first, 0, p5.nic("rdmap79s0"))[0] is Distance.SWITCH
    assert p5.distance(first, 0, p5.nic("rdmap96s0"))[0] is Distance.NUMA
    assert p5.distance(first, 0, p5.nic("rdmap147s0"))[0] is Distance.SYSTEM
    assert [node.socket for node in p5.nodes] == [0, 1]
    assert [len(node.cpus) for node in p5.nodes] == [96, 96]
    assert p5.nodes[0].distances == (10, 21)
    assert p5.cpus[0].core == p5.cpus[96].core == (0, 96)
    assert (p5.online, p5.iommu_groups) == (192, 0)
    assert [(pages.size, pages.total) for pages in p5.huge_pages] == [(2 << 20, 5128)]
    assert len(p5.acs) == 8 * 3
    assert {bridge.redirects for bridge in p5.acs} == {False}


def test_dgx(machine: Machine) -> None:
    dgx = machine("DGX H100")
    assert len(dgx.gpus) == 8
    assert len(dgx.rdma_nics) == 12
    assert {nic.kind for nic in dgx.nics} == {NicKind.CONNECTX}
    assert {nic.link_layer for nic in dgx.nics if nic.gbps == 400} == {"InfiniBand"}
    assert dgx.nic("mlx5_0").netdevs == ("ibp24s0",)
    assert dgx.nic("mlx5_1").pci is not None
    assert {gpu.pci.iommu_type for gpu in dgx.gpus} == {"identity"}
    assert not any(gpu.pci.translated for gpu in dgx.gpus)
    assert dgx.iommu_groups == 16


def test_dual_socket(machine: Machine) -> None:
    box = machine("dual socket")
    assert box.gpus == box.acs == ()
    assert [(nic.name, nic.pci and nic.pci.numa_node) for nic in box.nics] == [("mlx5_0", 0), ("mlx5_1", 1)]
    assert box.distance(None, 0, box.nic("mlx5_0"))[0] is Distance.NUMA
    assert box.distance(None, 0, box.nic("mlx5_1"))[0] is Distance.SYSTEM
    assert [pages.size for pages in box.huge_pages] == [2 << 20, 1 << 30]


def test_a_virtual_machine_is_one_node(machine: Machine) -> None:
    vm = machine("virtual machine")
    assert [(node.id, node.cpus, node.socket) for node in vm.nodes] == [(0, (0, 1), 0)]
    (nic,) = vm.nics
    assert (nic.name, nic.kind, nic.rdma) == ("eth0", NicKind.ETHERNET, False)
    assert nic.pci is not None
    assert (nic.pci.address, nic.pci.numa_node, nic.pci.driver) == ("0000:00:03.0", 0, "virtio-pci")
    assert vm.rdma_nics == ()
    assert vm.usable_nics == vm.nics


def test_reading_is_deterministic_and_writes_nothing(sysfs: Path) -> None:
    dual_socket(sysfs)
    before = {path: path.lstat().st_mtime_ns for path in sysfs.rglob("*")}
    assert read_topology(sysfs) == read_topology(sysfs / ".." / sysfs.name)
    assert {path: path.lstat().st_mtime_ns for path in sysfs.rglob("*")} == before


def test_this_machine() -> None:
    """Whatever it is: it has CPUs, each in a node, and a rank can be placed."""
    own = read_topology(Path("/sys"), allowed=os.sched_getaffinity(0))
    assert {cpu.number for cpu in own.cpus} <= {cpu for node in own.nodes for cpu in node.cpus}
    assert len(own.cpus) <= len(os.sched_getaffinity(0))
    assert assign(own, 1)[0].rank == 0


def test_offline_and_forbidden_cpus(sysfs: Path) -> None:
    tree = Sysfs(sysfs)
    tree.cpus(sockets=1, cores=4, threads=2, offline=(5,))
    tree.node(0, "0-7", "10")
    topology = read_topology(sysfs, allowed={1, 2, 5, 6, 99})
    assert topology.online == 7
    assert topology.nodes[0].cpus == (0, 1, 2, 3, 4, 6, 7)
    assert [(cpu.number, cpu.core) for cpu in topology.cpus] == [(1, (1,)), (2, (2, 6)), (6, (2, 6))]
    (sysfs / "devices/system/cpu/online").unlink()
    assert read_topology(sysfs).online == 7


def test_rdma_hardware_without_a_driver_is_seen(sysfs: Path) -> None:
    tree = Sysfs(sysfs)
    card = tree.pci("pci0000:00/0000:00:04.0", "15b3:1021", 0x020000)
    tree.netdev(card, "eth1", state="down")
    tree.pci("pci0000:00/0000:00:05.0", "1d0f:efa1", 0x020000)
    tree.pci("pci0000:00/0000:00:06.0", "15b3:c2d5", 0x080100)  # a BlueField's DMA engine is no NIC
    nics = read_topology(sysfs).nics
    assert [(nic.name, nic.kind, nic.rdma_device, nic.active) for nic in nics] == [
        ("eth1", NicKind.CONNECTX, None, False),
        ("0000:00:05.0", NicKind.EFA, None, False),
    ]


def test_links_that_are_down_and_software_rdma_are_not_used(sysfs: Path) -> None:
    tree = Sysfs(sysfs)
    card = tree.pci("pci0000:00/0000:00:04.0", "15b3:1021", 0x020000)
    tree.rdma(card, "mlx5_0", state="1: DOWN")
    other = tree.pci("pci0000:00/0000:00:05.0", "8086:1593", 0x020000)
    tree.rdma(other, "irdma0", layer="Ethernet", gbps=100)
    tree.file("devices/virtual/infiniband/rxe0/ports/1/state", "4: ACTIVE")
    tree.link("class/infiniband/rxe0", "devices/virtual/infiniband/rxe0")
    topology = read_topology(sysfs)
    assert [(nic.name, nic.kind, nic.active) for nic in topology.nics] == [
        ("mlx5_0", NicKind.CONNECTX, False),
        ("irdma0", NicKind.RDMA, True),
    ]
    assert [nic.name for nic in topology.usable_nics] == ["irdma0"]


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8\n", (0, 1, 2, 3, 8)),
        ("", ()),
        ("\n", ()),
        ("7", (7,)),
        ("3,1,1-2", (1, 2, 3)),
        ("4-2", ()),
        ("0-99999999999", ()),
        ("0-999999", ()),
        ("-1", ()),
        ("1,x,2-,3", (1, 3)),
        ("٣", ()),
    ],
)
def test_cpulists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpulist(text) == cpus


def test_acs() -> None:
    assert acs_redirects(config_space(redirect=True)) is True
    assert acs_redirects(config_space(redirect=False)) is False
    assert acs_redirects(config_space(redirect=None)) is None
    assert acs_redirects(b"") is None
    assert acs_redirects(bytes(4096)) is False
    assert acs_redirects(b"\xff" * 4096) is False
    loop = bytearray(4096)
    loop[0x100:0x104] = (0x100 << 20 | 0x0001).to_bytes(4, "little")
    assert acs_redirects(bytes(loop)) is False


# ---- damage ----


def _garbage(path: Path, rng: random.Random) -> None:
    path.write_bytes(
        rng.choice([b"", b"\0\xff\xfe", b"-1\n", b"99999999999999999999\n", b"0-\n", b"a" * 200_000])
    )


def _folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _dangling(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("/nonexistent/anywhere")


def _loop(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _outside(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def _forbidden(path: Path, rng: random.Random) -> None:
    path.chmod(0)


DAMAGE: list[Callable[[Path, random.Random], None]] = [
    _garbage,
    _folder,
    _dangling,
    _loop,
    _pipe,
    _outside,
    _forbidden,
    lambda path, rng: path.unlink(),
]


def _sane(topology: Topology) -> None:
    for ranks in (1, 3):
        places = assign(topology, ranks)
        assert len(places) == ranks
        assert all(bool(place.nics) == bool(topology.usable_nics) for place in places)


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_tree_is_read_all_the_same(sysfs: Path, seed: int) -> None:
    """A handful of damaged files up to nearly all of them; links too."""
    rng = random.Random(seed)
    (dual_socket if seed % 2 else virtual_machine)(sysfs)
    files = sorted(path for path in sysfs.rglob("*") if path.is_symlink() or path.is_file())
    for path in rng.sample(files, max(1, int(len(files) * rng.choice([0.03, 0.2, 0.9])))):
        if path.is_symlink():
            rng.choice([_dangling, _loop, _outside, _folder])(path, rng)
        else:
            rng.choice(DAMAGE)(path, rng)
    _sane(read_topology(sysfs, allowed=range(64)))


def test_what_is_missing_is_unknown(sysfs: Path) -> None:
    _sane(read_topology(sysfs))  # not even the directory
    sysfs.mkdir()
    assert read_topology(sysfs) == Topology()
    (sysfs / "devices").write_text("a file")
    assert read_topology(sysfs) == Topology()


def test_links_that_lead_out_of_the_tree_are_not_followed(sysfs: Path, tmp_path: Path) -> None:
    virtual_machine(sysfs)
    outside = tmp_path / "outside"
    outside.write_text("0\n")
    online = sysfs / "devices/system/cpu/online"
    online.unlink()
    online.symlink_to(outside)
    assert read_topology(sysfs).online == 2


@pytest.mark.parametrize("name", MACHINES)
def test_machines_are_sane(machine: Machine, name: str) -> None:
    _sane(machine(name))
