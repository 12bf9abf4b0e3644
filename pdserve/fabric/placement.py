"""Which NICs and CPUs each rank gets. Pure and deterministic: the same machine gives the same answer.

NICs. A rank's candidates are the NICs nearest to it, all at one distance; a NIC that is nobody's nearest
stays free (storage NICs, mostly), because a detour costs more than it brings. Where ranks share candidates
they share them evenly: no two ranks with the same candidates differ by more than one NIC, no two NICs with
the same ranks by more than one rank, and no candidate is idle.

CPUs. Ranks live on the NUMA node of their device, ranks without one are spread over the nodes. A node's cores
are cut into equal shares, one a rank; the last core of a share is for the poller of its NICs, which must be
pinned before they are opened (memory goes where the thread that touches it first runs), the rest for the
worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.fabric.topology import Distance, Nic, NumaNode, Pci, Topology


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where one rank works.

    gpu: PCI address, None on a machine without. numa_node: where its CPUs and host memory should be. nics:
    names, in the order of PCI addresses; empty only where the machine has none with a link. distance: of all
    of them. worker_cpus: empty where there are fewer CPUs than ranks: then the kernel's scheduler divides
    them better than any fixed share. poller_cpu: None where the rank has not two CPUs. CPUs of one rank are
    no other rank's.
    """

    rank: int
    gpu: str | None
    numa_node: int | None
    nics: tuple[str, ...]
    distance: Distance | None
    worker_cpus: tuple[int, ...]
    poller_cpu: int | None


@dataclass(frozen=True, slots=True)
class _Seat:
    rank: int
    pci: Pci | None
    numa_node: int | None


def assign(topology: Topology, ranks: int, *, gpus: Sequence[str] | None = None) -> tuple[RankPlacement, ...]:
    """A placement for each of `ranks` ranks.

    gpus: PCI addresses, one a rank, where not simply the first ones are meant (more ranks than GPUs go
    round). Several nodes on one machine must not each take all: let each ask for all ranks of the machine and
    use its own. ValueError for fewer than one rank, an unknown GPU or a wrong number of them.
    """
    seats = _seats(topology, ranks, gpus)
    nics = _share_nics(topology, seats)
    cpus = _share_cpus(topology, seats)
    return tuple(
        RankPlacement(
            seat.rank,
            None if seat.pci is None else seat.pci.address,
            seat.numa_node,
            tuple(nic.name for nic in own),
            topology.distance(seat.pci, seat.numa_node, own[0])[0] if own else None,
            *_split(topology, share),
        )
        for seat, own, share in zip(seats, nics, cpus, strict=True)
    )


def _seats(topology: Topology, ranks: int, gpus: Sequence[str] | None) -> list[_Seat]:
    if ranks < 1:
        raise ValueError(f"ranks: {ranks} is below 1")
    known = {gpu.pci.address: gpu.pci for gpu in topology.gpus}
    if gpus is not None:
        if len(gpus) != ranks:
            raise ValueError(f"gpus: {len(gpus)} of them for {ranks} ranks")
        for address in gpus:
            if address not in known:
                raise ValueError(f"gpus: there is no {address}; there are {', '.join(known) or 'none'}")
        devices = [known[address] for address in gpus]
    elif topology.gpus:
        devices = [topology.gpus[rank % len(topology.gpus)].pci for rank in range(ranks)]
    else:
        homes = [node.id for node in topology.nodes if _usable(topology, node)]
        return [
            _Seat(rank, None, homes[rank * len(homes) // ranks] if homes else None) for rank in range(ranks)
        ]
    return [_Seat(rank, pci, pci.numa_node) for rank, pci in enumerate(devices)]


# ---- NICs ----


def _share_nics(topology: Topology, seats: list[_Seat]) -> list[list[Nic]]:
    usable = topology.usable_nics
    candidates = [_nearest(topology, seat, usable) for seat in seats]
    own: list[list[int]] = [[] for _ in seats]
    users = [0] * len(usable)
    takers = {n: [seat for seat, near in enumerate(candidates) if n in near] for n in range(len(usable))}

    # Each NIC to the rank that has fewest, NICs with the least choice first: none is left idle.
    for n in sorted((n for n in takers if takers[n]), key=lambda n: (len(takers[n]), n)):
        seat = min(takers[n], key=lambda seat: (len(own[seat]), len(candidates[seat]), seat))
        own[seat].append(n)
        users[n] += 1
    # Ranks that got none, where there are more of them than NICs, to the NIC with the fewest ranks.
    for seat in sorted(range(len(seats)), key=lambda seat: (len(candidates[seat]), seat)):
        if not own[seat] and candidates[seat]:
            n = min(candidates[seat], key=lambda n: (users[n], n))
            own[seat].append(n)
            users[n] += 1
    return [[usable[n] for n in sorted(chosen)] for chosen in own]


def _nearest(topology: Topology, seat: _Seat, nics: Sequence[Nic]) -> list[int]:
    distances = [topology.distance(seat.pci, seat.numa_node, nic) for nic in nics]
    return [n for n, distance in enumerate(distances) if distance == min(distances)]


# ---- CPUs ----


def _usable(topology: Topology, node: NumaNode) -> list[int]:
    return [cpu.number for cpu in topology.cpus if cpu.number in node.cpus]


def _home(topology: Topology, numa_node: int | None) -> NumaNode | None:
    """The node that lends its CPUs: the rank's own, or the nearest that has any for us."""
    nodes = [node for node in topology.nodes if _usable(topology, node)]
    position = {node.id: at for at, node in enumerate(topology.nodes)}
    own = next((node for node in topology.nodes if node.id == numa_node), None)

    def far(node: NumaNode) -> tuple[bool, int, bool, int]:
        away = own.distances[position[node.id]] if own is not None and own.distances else 0
        other_socket = own is None or own.socket is None or own.socket != node.socket
        return (node.id != numa_node, away, other_socket, node.id)

    return min(nodes, key=far, default=None)


def _share_cpus(topology: Topology, seats: list[_Seat]) -> list[tuple[int, ...]]:
    homes = [_home(topology, seat.numa_node) for seat in seats]
    shares: list[tuple[int, ...]] = [()] * len(seats)
    for node in topology.nodes:
        guests = [at for at, home in enumerate(homes) if home is not None and home.id == node.id]
        units = _cores(topology, _usable(topology, node))
        if len(units) < len(guests):
            units = [(cpu,) for unit in units for cpu in unit]
        size = len(units) // len(guests) if guests else 0
        for turn, at in enumerate(guests):
            shares[at] = tuple(cpu for unit in units[turn * size : (turn + 1) * size] for cpu in unit)
    return shares


def _cores(topology: Topology, cpus: Sequence[int]) -> list[tuple[int, ...]]:
    """These CPUs by core, in the order of each core's first CPU."""
    core_of = {cpu.number: cpu.core for cpu in topology.cpus}
    found: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in taken:
            core = tuple(other for other in core_of[cpu] if other in cpus and other not in taken)
            taken.update(core)
            found.append(core)
    return found


def _split(topology: Topology, share: Sequence[int]) -> tuple[tuple[int, ...], int | None]:
    """Worker CPUs and poller CPU. Where there are two cores or more the poller has one to itself, and the
    other threads of that core stay idle: they would only slow it."""
    cores = _cores(topology, share)
    if len(cores) > 1:
        return tuple(sorted(cpu for core in cores[:-1] for cpu in core)), cores[-1][0]
    if len(share) > 1:
        return tuple(share[:-1]), share[-1]
    return tuple(share), None
