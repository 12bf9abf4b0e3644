"""The facts for people, and for programs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from pdserve.fabric.topology import Nic
from pdserve.node.doctor.facts import Facts, PathFacts
from pdserve.node.doctor.findings import notes, problems, size
from pdserve.node.doctor.peers import PeerFacts


def as_lines(facts: Facts) -> list[str]:
    """The whole report, findings last."""
    lines = [*_library(facts), *_machine(facts), *_ranks(facts), *_limits(facts)]
    lines += [line for path in facts.paths for line in _path(path)]
    lines += [_peer(peer) for peer in facts.peers]
    lines += [f"note: {note}" for note in notes(facts)]
    found = problems(facts)
    lines += [f"problem: {problem}" for problem in found]
    return [*lines, "all is well" if not found else f"{len(found)} problem{'s' if len(found) > 1 else ''}"]


def as_json(facts: Facts) -> dict[str, Any]:
    """One object of plain keys; bytes, microseconds, milliseconds and GB/s (10**9 bytes) as the names say."""
    found = problems(facts)
    library, limits, topology = facts.library, facts.limits, facts.topology
    return {
        "ok": not found,
        "problems": found,
        "notes": notes(facts),
        "libfabric": {"version": library.version, "path": library.path, "error": library.error or None},
        "providers": [
            {
                "provider": offer.provider,
                "version": offer.version,
                "endpoint": offer.endpoint,
                "domain": offer.domain,
                "fabric": offer.fabric,
                "fits": offer.fits,
            }
            for offer in library.offers
        ],
        "gpus": [
            {"address": gpu.pci.address, "device": gpu.device_id, "numa_node": gpu.pci.numa_node}
            for gpu in topology.gpus
        ],
        "nics": [_nic(nic) for nic in topology.nics],
        "numa_nodes": [
            {"id": node.id, "socket": node.socket, "cpus": list(node.cpus)} for node in topology.nodes
        ],
        "cpus": [cpu.number for cpu in topology.cpus],
        "huge_pages": [
            {"size_bytes": pages.size, "total": pages.total, "free": pages.free}
            for pages in topology.huge_pages
        ],
        "iommu_groups": topology.iommu_groups,
        "acs_redirects": {bridge.address: bridge.redirects for bridge in topology.acs},
        "ranks": [
            {
                "rank": place.rank,
                "gpu": place.gpu,
                "numa_node": place.numa_node,
                "nics": list(place.nics),
                "distance": None if place.distance is None else place.distance.words,
                "worker_cpus": list(place.worker_cpus),
                "poller_cpu": place.poller_cpu,
            }
            for place in facts.ranks
        ],
        "limits": {
            "memlock_bytes": limits.memlock,
            "memlock_exempt": limits.memlock_exempt,
            "nofile": limits.nofile,
        },
        "paths": [_path_json(path) for path in facts.paths],
        "peers": [
            {
                "url": peer.url,
                "reachable": not peer.error,
                "live": peer.live,
                "ready": peer.ready,
                "reason": peer.reason or peer.error or None,
                "role": peer.role or None,
                "provider": peer.provider or None,
                "hello": peer.hello,
                "hello_error": peer.hello_error or None,
            }
            for peer in facts.peers
        ],
    }


def _nic(nic: Nic) -> dict[str, Any]:
    return {
        "name": nic.name,
        "kind": nic.kind.value,
        "address": None if nic.pci is None else nic.pci.address,
        "numa_node": None if nic.pci is None else nic.pci.numa_node,
        "rdma_device": nic.rdma_device,
        "netdevs": list(nic.netdevs),
        "active": nic.active,
        "link_layer": nic.link_layer or None,
        "gbit_per_s": nic.gbps,
    }


def _path_json(path: PathFacts) -> dict[str, Any]:
    figures = path.figures
    gbs = {} if figures is None else {f"gb_per_s_{_page(page)}": rate for page, rate in figures.gbs.items()}
    return {
        "provider": path.provider,
        "host": path.host,
        "domain": None if figures is None else figures.domain,
        "round_trip_us": None if figures is None else figures.round_trip_us,
        **gbs,
        "fence_ms": None if figures is None else figures.fence_ms,
        "error": path.error or None,
    }


# ---- lines ----


def _library(facts: Facts) -> Iterator[str]:
    library = facts.library
    yield f"libfabric: {f'{library.version} at {library.path}' if library.path else 'none'}"
    domains: dict[str, list[str]] = {}
    for offer in library.offers:
        if offer.endpoint == "RDM" and offer.fits:
            domains.setdefault(f"{offer.provider} {offer.version}", []).append(offer.domain)
    for provider, found in domains.items():
        yield f"  provider {provider}: {_several(dict.fromkeys(found))}"


def _machine(facts: Facts) -> Iterator[str]:
    topology = facts.topology
    gpus = Counter(gpu.device_id for gpu in topology.gpus)
    models = ", ".join(f"{count} x {device or '?'}" for device, count in gpus.items())
    yield f"GPUs: {models or 'none'}"
    yield "NICs:" if topology.nics else "NICs: none"
    for nic in topology.nics:
        yield f"  {_nic_line(nic)}"
    for node in topology.nodes:
        socket = "" if node.socket is None else f", socket {node.socket}"
        yield f"NUMA node {node.id}{socket}: CPUs {cpulist(node.cpus)}"
    pages = ", ".join(
        f"{page.total} of {size(page.size)} ({page.free} free)" for page in topology.huge_pages if page.total
    )
    yield f"huge pages: {pages or 'none'}"
    yield f"IOMMU groups: {topology.iommu_groups or 'none'}"


def _nic_line(nic: Nic) -> str:
    parts = [nic.name, nic.kind.value]
    if nic.pci is not None:
        parts.append(nic.pci.address)
        parts.append(f"NUMA {'?' if nic.pci.numa_node is None else nic.pci.numa_node}")
    if nic.link_layer and nic.rdma:
        parts.append(nic.link_layer)
    if nic.gbps is not None:
        parts.append(f"{nic.gbps:.4g} Gb/s")
    if nic.rdma and nic.rdma_device is None:
        parts.append("no RDMA driver")
    if not nic.active:
        parts.append("no link")
    return ", ".join(parts)


def _ranks(facts: Facts) -> Iterator[str]:
    for place in facts.ranks:
        where = place.gpu or "CPU"
        nics = f"{', '.join(place.nics)} ({place.distance.words})" if place.distance is not None else "no NIC"
        cpus = f"worker CPUs {cpulist(place.worker_cpus)}" if place.worker_cpus else "no CPUs of its own"
        poller = "" if place.poller_cpu is None else f", poller CPU {place.poller_cpu}"
        yield f"rank {place.rank}: {where}, {nics}, {cpus}{poller}"


def _limits(facts: Facts) -> Iterator[str]:
    limits = facts.limits
    memlock = "unlimited" if limits.memlock is None else size(limits.memlock)
    exempt = " (not enforced: CAP_IPC_LOCK)" if limits.memlock_exempt and limits.memlock is not None else ""
    nofile = "unlimited" if limits.nofile is None else limits.nofile
    yield f"limits: locked memory {memlock}{exempt}, open files {nofile}"


def _path(path: PathFacts) -> Iterator[str]:
    figures = path.figures
    if figures is None:
        yield f"path {path.provider} on {path.host}: failed"
        return
    rates = ", ".join(f"{rate:.2f} GB/s in pages of {size(page)}" for page, rate in figures.gbs.items())
    yield (
        f"path {path.provider} on {path.host} ({figures.domain}), with itself: round trip "
        f"{figures.round_trip_us:.0f} us, {rates}, fence {figures.fence_ms:.2f} ms"
    )


def _peer(peer: PeerFacts) -> str:
    if peer.error:
        return f"peer {peer.url}: unreachable"
    state = "ready" if peer.ready else "live, not ready" if peer.live else "not live"
    provider = f", fabric {peer.provider}" if peer.provider else ""
    return f"peer {peer.url}: {peer.role or 'node'}, {state}{provider}, hello {'yes' if peer.hello else 'no'}"


def cpulist(cpus: Iterable[int]) -> str:
    """Numbers in the kernel's list format: "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def _several(words: Iterable[str], most: int = 4) -> str:
    listed = list(words)
    rest = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + rest


def _page(count: int) -> str:
    return f"{count >> 20}m" if count >= 1 << 20 else f"{count >> 10}k"
