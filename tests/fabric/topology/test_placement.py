"""Placement: on four machines by name, and on any machine by property."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.fabric import RankPlacement, Topology, assign
from pdserve.fabric.topology import Cpu, Distance, Gpu, Nic, NicKind, NumaNode, Pci
from tests.fabric.topology.conftest import Machine
from tests.fabric.topology.machines import MACHINES


def nics_of(places: tuple[RankPlacement, ...]) -> list[tuple[str, ...]]:
    return [place.nics for place in places]


class TestMachines:
    def test_p5(self, machine: Machine) -> None:
        places = assign(machine("p5.48xlarge"), 8)
        assert places[0].gpu == "0000:53:00.0"
        assert places[0].nics == ("rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0")
        assert {len(place.nics) for place in places} == {4}
        assert len({nic for place in places for nic in place.nics}) == 32
        assert {place.distance for place in places} == {Distance.SWITCH}
        assert [place.numa_node for place in places] == [0] * 4 + [1] * 4
        # 12 cores a rank: eleven for the worker, the last one for the poller alone.
        assert places[0].worker_cpus == (*range(11), *range(96, 107))
        assert places[0].poller_cpu == 11
        assert places[7].poller_cpu == 95

    def test_dgx(self, machine: Machine) -> None:
        places = assign(machine("DGX H100"), 8)
        assert nics_of(places) == [(f"mlx5_{n}",) for n in (0, 3, 4, 5, 6, 9, 10, 11)]
        assert {place.distance for place in places} == {Distance.SWITCH}

    def test_one_gpu_of_many(self, machine: Machine) -> None:
        (place,) = assign(machine("DGX H100"), 1, gpus=["0000:c3:00.0"])
        assert (place.gpu, place.nics, place.numa_node) == ("0000:c3:00.0", ("mlx5_9",), 1)
        assert set(place.worker_cpus) <= {*range(56, 112), *range(168, 224)}

    def test_more_ranks_than_gpus_go_round(self, machine: Machine) -> None:
        places = assign(machine("DGX H100"), 16)
        assert places[9].gpu == places[1].gpu
        assert Counter(nic for place in places for nic in place.nics).most_common()[-1][1] == 2

    def test_dual_socket(self, machine: Machine) -> None:
        box = machine("dual socket")
        one = assign(box, 1)[0]
        assert (one.gpu, one.numa_node, one.nics) == (None, 0, ("mlx5_0",))
        assert (one.worker_cpus, one.poller_cpu) == (tuple(range(15)), 15)
        assert nics_of(assign(box, 2)) == [("mlx5_0",), ("mlx5_1",)]
        four = assign(box, 4)
        assert nics_of(four) == [("mlx5_0",), ("mlx5_0",), ("mlx5_1",), ("mlx5_1",)]
        assert [place.poller_cpu for place in four] == [7, 15, 23, 31]

    def test_a_virtual_machine(self, machine: Machine) -> None:
        vm = machine("virtual machine")
        (place,) = assign(vm, 1)
        assert (place.nics, place.worker_cpus, place.poller_cpu) == (("eth0",), (0,), 1)
        assert [(place.worker_cpus, place.poller_cpu) for place in assign(vm, 2)] == [
            ((0,), None),
            ((1,), None),
        ]
        assert {(place.nics, place.worker_cpus) for place in assign(vm, 3)} == {(("eth0",), ())}

    def test_a_cpuset_that_leaves_the_device_s_node_out(self, machine: Machine) -> None:
        """CPUs come from the nearest node that has any; the NIC stays the device's."""
        dgx = machine("DGX H100")
        narrow = Topology(
            dgx.gpus, dgx.nics, dgx.nodes, tuple(cpu for cpu in dgx.cpus if cpu.number in (60, 61))
        )
        (place,) = assign(narrow, 1)
        assert (place.numa_node, place.nics) == (0, ("mlx5_0",))
        assert (place.worker_cpus, place.poller_cpu) == ((60,), 61)


def test_a_deeper_switch_is_nearer() -> None:
    """Two GPUs below one switch, each with a NIC below a switch of its own in it."""
    top = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
    inner = [(*top, f"0000:02:0{n}.0", f"0000:0{n + 3}:00.0") for n in range(2)]
    gpus = tuple(Gpu(Pci(f"0000:1{n}:00.0", inner[n], 0)) for n in range(2))
    nics = tuple(
        Nic(f"n{n}", NicKind.CONNECTX, Pci(f"0000:2{n}:00.0", inner[1 - n], 0), f"n{n}") for n in range(2)
    )
    assert nics_of(assign(Topology(gpus, nics), 2)) == [("n1",), ("n0",)]


def test_who_has_a_choice_leaves_the_others_theirs() -> None:
    """One GPU has two NICs below its switch, the other finds all four of its NUMA node equally near."""
    switch = ("pci0000:20", "0000:20:01.0", "0000:21:00.0")
    gpus = (Gpu(Pci("0000:10:00.0", ("pci0000:10",), 0)), Gpu(Pci("0000:22:00.0", switch, 0)))
    chains = (switch, switch, ("pci0000:30",), ("pci0000:40",))
    nics = tuple(
        Nic(f"n{n}", NicKind.EFA, Pci(f"0000:5{n}:00.0", chain, 0), f"n{n}") for n, chain in enumerate(chains)
    )
    assert nics_of(assign(Topology(gpus, nics), 2)) == [("n2", "n3"), ("n0", "n1")]


def test_the_same_root_complex_beats_the_same_node() -> None:
    gpu = Gpu(Pci("0000:10:1c.0", ("pci0000:10",), 0))
    far = Nic("far", NicKind.EFA, Pci("0000:00:1b.0", ("pci0000:00",), 0), "far")
    near = Nic("near", NicKind.EFA, Pci("0000:10:1b.0", ("pci0000:10",), 0), "near")
    (place,) = assign(Topology((gpu,), (far, near)), 1)
    assert (place.nics, place.distance) == (("near",), Distance.HOST_BRIDGE)


def test_the_same_socket_beats_another() -> None:
    nodes = (NumaNode(0, (0,), 0), NumaNode(1, (1,), 0), NumaNode(2, (2,), 1))
    gpu = Gpu(Pci("0000:f0:00.0", ("pci0000:f0",), 0))
    nics = tuple(
        Nic(f"node{n}", NicKind.EFA, Pci(f"0000:{n}0:00.0", (f"pci0000:{n}0",), n), f"node{n}")
        for n in (2, 1)
    )
    (place,) = assign(Topology((gpu,), nics, nodes), 1)
    assert (place.nics, place.distance) == (("node1",), Distance.SOCKET)


@pytest.mark.parametrize(
    ("ranks", "gpus", "words"),
    [
        (0, None, "ranks: 0 is below 1"),
        (1, ["0000:99:00.0"], "there is no 0000:99:00.0; there are 0000:53:00.0"),
        (2, ["0000:53:00.0"], "gpus: 1 of them for 2 ranks"),
    ],
)
def test_bad_arguments(machine: Machine, ranks: int, gpus: list[str] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        assign(machine("p5.48xlarge"), ranks, gpus=gpus)


# ---- any machine ----


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Machines with no rhyme or reason: devices anywhere, NUMA known or not, CPUs allowed or not."""
    bridges = [
        ("pci0000:00",),
        ("pci0000:00", "0000:00:01.0"),
        ("pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0"),
        ("pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:01.0"),
        ("pci0000:80",),
        ("pci0000:80", "0000:80:01.0"),
        (),
    ]
    count = draw(st.integers(0, 4))
    threads = draw(st.integers(1, 2))
    cores = draw(st.integers(1, 5))
    nodes, cpus = [], []
    for node in range(count):
        numbers = [node * cores * threads + n for n in range(cores * threads)]
        nodes.append(NumaNode(node, tuple(numbers), node // 2))
        for n in numbers:
            core = tuple(cpu for cpu in numbers if cpu % cores == n % cores)
            cpus.append(Cpu(n, core, node // 2))
    usable = tuple(cpu for cpu in cpus if draw(st.integers(0, 3)))
    numa = st.one_of(st.none(), st.integers(0, 4))
    place = st.tuples(st.sampled_from(bridges), numa)
    gpus = [
        Gpu(Pci(f"0000:a{n}:00.0", chain, node))
        for n, (chain, node) in enumerate(draw(st.lists(place, max_size=5)))
    ]
    nics = [
        Nic(
            f"n{n}",
            NicKind.CONNECTX,
            Pci(f"0000:b{n}:00.0", chain, node) if chain else None,
            draw(st.sampled_from([f"n{n}", f"n{n}", None])),
            active=draw(st.booleans()),
        )
        for n, (chain, node) in enumerate(draw(st.lists(place, max_size=9)))
    ]
    return Topology(tuple(gpus), tuple(nics), tuple(nodes), usable, len(cpus))


@given(topologies(), st.integers(1, 9))
def test_any_machine(topology: Topology, ranks: int) -> None:
    places = assign(topology, ranks)
    assert places == assign(topology, ranks)
    assert [place.rank for place in places] == list(range(ranks))
    _check_nics(topology, places)
    _check_cpus(topology, places)


def _check_nics(topology: Topology, places: tuple[RankPlacement, ...]) -> None:
    usable = topology.usable_nics
    pci = {gpu.pci.address: gpu.pci for gpu in topology.gpus}
    users = Counter(nic for place in places for nic in place.nics)
    takers: dict[str, list[int]] = defaultdict(list)
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place in places:
        assert len(set(place.nics)) == len(place.nics)
        if not usable:
            assert (place.nics, place.distance) == ((), None)
            continue
        device = pci[place.gpu] if place.gpu else None
        distances = {nic.name: topology.distance(device, place.numa_node, nic) for nic in usable}
        nearest = tuple(name for name in distances if distances[name] == min(distances.values()))
        # Each rank has one, and only from the nearest.
        assert place.nics
        assert set(place.nics) <= set(nearest)
        assert place.distance is min(distances.values())[0]
        alike[nearest].append(len(place.nics))
        for name in nearest:
            takers[name].append(place.rank)
    # No NIC that is somebody's nearest is idle, and those who share the same ones share them evenly.
    assert users.keys() == takers.keys()
    for counts in alike.values():
        assert max(counts) - min(counts) <= 1
    load: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for name, ranks in takers.items():
        load[tuple(ranks)].append(users[name])
    for loads in load.values():
        assert max(loads) - min(loads) <= 1


def _check_cpus(topology: Topology, places: tuple[RankPlacement, ...]) -> None:
    usable = {cpu.number for cpu in topology.cpus}
    node_of = {cpu: node.id for node in topology.nodes for cpu in node.cpus}
    taken: set[int] = set()
    for place in places:
        poller = () if place.poller_cpu is None else (place.poller_cpu,)
        own = {*place.worker_cpus, *poller}
        assert len(own) == len(place.worker_cpus) + len(poller)
        assert own <= usable
        assert not own & taken
        assert not poller or place.worker_cpus
        homes = {node_of[cpu] for cpu in own}
        assert len(homes) <= 1
        # CPUs of the rank's own node where that has any for us.
        if homes and any(node_of[cpu] == place.numa_node for cpu in usable):
            assert homes == {place.numa_node}
        taken |= own
    if usable and len(places) == 1:
        assert places[0].worker_cpus


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 11])
def test_machines_by_property(machine: Machine, name: str, ranks: int) -> None:
    places = assign(machine(name), ranks)
    _check_nics(machine(name), places)
    _check_cpus(machine(name), places)


def test_nothing_at_all() -> None:
    (place,) = assign(Topology(), 1)
    assert place == RankPlacement(0, None, None, (), None, (), None)
