"""What is so: on this machine, on its paths, and at its peers."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.config import NodeConfig
from pdserve.errors import FabricError
from pdserve.fabric import FabricConfig, RankPlacement, Topology, assign, library
from pdserve.fabric.measure import PathFigures, measure
from pdserve.fabric.providers import Offer, providers
from pdserve.node.doctor.peers import PeerFacts, ask
from pdserve.node.self_test import this_machine

_CAP_IPC_LOCK = 14  # capabilities(7): locks memory past RLIMIT_MEMLOCK


@dataclass(frozen=True, slots=True)
class LibraryFacts:
    """libfabric: where it was found, its API version, and what it offers. error: why not."""

    path: str = ""
    version: str = ""
    offers: tuple[Offer, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of this process, None for unlimited. memlock: bytes that may be pinned, and whether a
    capability makes that moot. nofile: open descriptors."""

    memlock: int | None
    memlock_exempt: bool
    nofile: int | None


@dataclass(frozen=True, slots=True)
class PathFacts:
    """One provider on one address, measured with itself. error: why it could not be."""

    provider: str
    host: str
    figures: PathFigures | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    config: NodeConfig
    library: LibraryFacts
    topology: Topology
    ranks: tuple[RankPlacement, ...]
    limits: Limits
    paths: tuple[PathFacts, ...] = ()
    peers: tuple[PeerFacts, ...] = ()


def look(config: NodeConfig, ranks: int | None, sysfs: Path) -> Facts:
    """Everything that can be read. `ranks`: None means one a GPU, or one. Blocks for up to a second."""
    topology = this_machine(sysfs)
    return Facts(
        config,
        _library(config.fabric.library),
        topology,
        assign(topology, ranks or max(1, len(topology.gpus))),
        _limits(),
    )


async def probe(facts: Facts, urls: Sequence[str], *, seconds: float = 0.3) -> Facts:
    """The same with its paths measured (`seconds` a page size; 0: not at all) and its peers asked."""
    paths: tuple[PathFacts, ...] = ()
    if seconds and not facts.library.error:
        paths = (await _path(facts.config, seconds),)
    # After the measurement: answers that come in would disturb it.
    peers = await ask(urls)
    return replace(facts, paths=paths, peers=tuple(peers))


def fabric_options(config: NodeConfig) -> FabricConfig:
    """The fabric's own configuration out of a node's. Raises ConfigError."""
    fabric = config.fabric
    return FabricConfig(provider=fabric.provider, host=fabric.host, mode=fabric.mode, library=fabric.library)


async def _path(config: NodeConfig, seconds: float) -> PathFacts:
    options = fabric_options(config)
    facts = PathFacts(options.provider_name, options.host)
    try:
        return replace(facts, figures=await measure(options, seconds=seconds))
    except FabricError as error:
        return replace(facts, error=error.message)


def _library(path: str | None) -> LibraryFacts:
    found = ""
    try:
        found = library.load(path)
        return LibraryFacts(found, library.version(), providers(path))
    except FabricError as error:
        return LibraryFacts(found, library.version(), error=error.message)


def _limits() -> Limits:
    def soft(which: int) -> int | None:
        limit = resource.getrlimit(which)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    return Limits(soft(resource.RLIMIT_MEMLOCK), _exempt(), soft(resource.RLIMIT_NOFILE))


def _exempt() -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        held = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return False
    return bool(held >> _CAP_IPC_LOCK & 1)
