"""From facts to sentences. Pure. A problem must be put right before a node serves well; a note should be
known."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from pdserve.config import is_loopback
from pdserve.fabric.topology import Distance, Nic, NicKind
from pdserve.node.doctor.facts import Facts
from pdserve.node.doctor.peers import PeerFacts
from pdserve.node.self_test import idle_rdma, kinds, names

MIN_DESCRIPTORS = 1024

_PROVIDER_OF = {NicKind.EFA: "efa", NicKind.CONNECTX: "verbs", NicKind.RDMA: "verbs"}


def problems(facts: Facts) -> list[str]:
    """One sentence each, the most basic first; none means that all is well."""
    return [*_library(facts), *_rdma(facts), *_limits(facts), *_paths(facts), *_peers(facts)]


def notes(facts: Facts) -> list[str]:
    """One sentence each."""
    return [*_placement(facts), *_memory(facts), *_peer_to_peer(facts)]


# ---- problems ----


def _library(facts: Facts) -> Iterator[str]:
    if facts.library.error:
        yield facts.library.error


def _rdma(facts: Facts) -> Iterator[str]:
    hardware = facts.topology.rdma_nics
    wanted = facts.config.fabric.provider
    provider = facts.paths[0].provider if facts.paths else "tcp" if wanted == "auto" else wanted
    idle = idle_rdma(facts.topology, provider)
    if idle is not None:
        yield idle
    bare = tuple(nic for nic in hardware if nic.rdma_device is None)
    if bare:
        yield f"no driver offers RDMA on {kinds(bare)} ({names(bare)}): is its module loaded?"
    driven = tuple(nic for nic in hardware if nic.rdma_device is not None)
    if driven and not any(nic.active for nic in driven):
        yield f"none of the RDMA devices has a link: {names(driven)}"
    offered = {offer.provider.partition(";")[0].partition("-")[0] for offer in facts.library.offers}
    for needed in sorted({_PROVIDER_OF[nic.kind] for nic in driven}):
        if offered and needed not in offered:
            nics = tuple(nic for nic in driven if _PROVIDER_OF[nic.kind] == needed)
            yield (
                f"libfabric at {facts.library.path} does not offer {needed!r}, which {kinds(nics)} "
                f"({names(nics)}) need: name the vendor's build in fabric.library"
            )


def _limits(facts: Facts) -> Iterator[str]:
    limits, needed = facts.limits, facts.config.engine.kv_cache_memory_bytes
    memlock = limits.memlock
    if facts.topology.rdma_nics and not limits.memlock_exempt and memlock is not None and memlock < needed:
        yield (
            f"memory that may be locked is limited to {size(memlock)} (ulimit -l), an RDMA NIC must pin a KV "
            f"cache of {size(needed)}: set it to unlimited (LimitMEMLOCK=infinity)"
        )
    if limits.nofile is not None and limits.nofile < MIN_DESCRIPTORS:
        yield (
            f"open files are limited to {limits.nofile} (ulimit -n), a node with clients and peers needs "
            f"{MIN_DESCRIPTORS} and more"
        )


def _paths(facts: Facts) -> Iterator[str]:
    for path in facts.paths:
        if path.error:
            yield f"the path over {path.provider} on {path.host} does not work: {path.error}"


def _peers(facts: Facts) -> Iterator[str]:
    ours = facts.config.fabric.host
    for peer in facts.peers:
        yield from _peer(peer)
        host = urlsplit(peer.url).hostname or ""
        if not is_loopback(host) and is_loopback(ours):
            yield (
                f"{peer.url} is another host, and fabric.host = {ours} is an address that only this one can "
                "reach"
            )


def _peer(peer: PeerFacts) -> Iterator[str]:
    if peer.error:
        yield f"the prefill node at {peer.url} can't be reached: {peer.error}"
        return
    if not peer.live:
        yield f"the node at {peer.url} makes no progress and should be restarted: {peer.reason}"
    elif not peer.ready:
        yield f"the node at {peer.url} is not ready: {peer.reason}"
    if peer.hello_error:
        yield f"the node at {peer.url} can't be linked to: {peer.hello_error}"


# ---- notes ----


def _placement(facts: Facts) -> Iterator[str]:
    topology = facts.topology
    if not topology.usable_nics:
        yield "no NIC has a link: only nodes on this machine can be reached"
    far = [place for place in facts.ranks if place.distance is Distance.SYSTEM and topology.rdma_nics]
    for place in far:
        yield f"rank {place.rank} has no NIC near it: {', '.join(place.nics)} is across the system"
    if any(not place.worker_cpus for place in facts.ranks):
        yield (
            f"{len(facts.ranks)} ranks and {len(topology.cpus)} CPUs: some ranks have none of their own and "
            "are left to the kernel's scheduler"
        )
    elif any(place.poller_cpu is None for place in facts.ranks):
        yield "some ranks have only one CPU: it serves both the worker and the poller of its NICs"
    if len(topology.cpus) < topology.online:
        yield f"this process may use {len(topology.cpus)} of {topology.online} CPUs"
    used = {name for place in facts.ranks for name in place.nics}
    free = tuple(nic for nic in topology.usable_nics if nic.rdma and nic.name not in used)
    if free:
        yield f"{kinds(free)} nearest to no rank, left to others: {names(free)}"
    down: tuple[Nic, ...] = tuple(
        nic for nic in topology.rdma_nics if nic.rdma_device is not None and not nic.active
    )
    if down and len(down) < len(topology.rdma_nics):
        yield f"RDMA devices without a link: {names(down)}"


def _memory(facts: Facts) -> Iterator[str]:
    pages = facts.topology.huge_pages
    if facts.topology.rdma_nics and not any(page.total for page in pages):
        yield "no huge pages are reserved (vm.nr_hugepages): registering memory is slower without"


def _peer_to_peer(facts: Facts) -> Iterator[str]:
    """What makes data between a GPU and a NIC take a detour."""
    topology = facts.topology
    nics = tuple(nic for nic in topology.rdma_nics if nic.pci is not None and nic.pci.translated)
    gpus = [gpu.pci.address for gpu in topology.gpus if gpu.pci.translated]
    if gpus and topology.rdma_nics:
        yield (
            f"an IOMMU translates the DMA of {len(gpus)} GPUs: traffic between GPU and NIC goes through it "
            "(boot with iommu=pt)"
        )
    elif nics:
        yield f"an IOMMU translates the DMA of {names(nics)} (boot with iommu=pt)"
    if not topology.rdma_nics:
        return
    redirecting = [bridge.address for bridge in topology.acs if bridge.redirects]
    if redirecting:
        yield (
            f"ACS on {len(redirecting)} PCI bridges ({redirecting[0]} first) sends traffic between GPU and "
            "NIC up to the root complex: switch it off for GPUDirect"
        )
    elif any(bridge.redirects is None for bridge in topology.acs):
        yield "whether ACS slows traffic between GPU and NIC can't be read: only root may"


def size(count: int) -> str:
    """Bytes for people: "64 KiB", "1.5 GiB"."""
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.4g} {unit}"
