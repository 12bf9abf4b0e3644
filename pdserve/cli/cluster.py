"""What `pdserve up` starts: the configuration of every node of a local cluster, from one base
configuration. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdserve.config import EngineConfig, NodeConfig, Role, check
from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node to start. `url` is where this machine reaches it."""

    name: str
    role: Role
    url: str
    config: NodeConfig


@dataclass(frozen=True, slots=True)
class Counts:
    """How many nodes of each role."""

    prefill: int
    decode: int
    both: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.both


def count_nodes(prefill: int | None, decode: int | None, both: int) -> Counts:
    """The counts asked for: one prefill and one decode node, unless only `both` nodes were asked for.

    Raises `ConfigError` for a decode node without a prefill node, and the other way round.
    """
    if prefill is None and decode is None:
        ones = 0 if both else 1
        counts = Counts(ones, ones, both)
    else:
        counts = Counts(1 if prefill is None else prefill, 1 if decode is None else decode, both)
    if (counts.prefill == 0) != (counts.decode == 0):
        raise ConfigError(
            f"--prefill {counts.prefill} --decode {counts.decode}: each needs at least one of the other",
            param="decode" if counts.decode == 0 else "prefill",
        )
    if counts.total == 0:
        raise ConfigError("no node to start: give --prefill and --decode, or --both", param="prefill")
    return counts


def divide_cpus(cpus: Sequence[int], nodes: int) -> list[tuple[int, ...] | None]:
    """A share of `cpus` of its own for each node, all of one size; None for all if there are fewer CPUs
    than nodes.

    Workers that compete for a core slow each other more than the core is worth; with too few, the kernel's
    scheduler divides them better than a fixed share would.
    """
    share = len(cpus) // nodes
    if share == 0:
        return [None] * nodes
    return [tuple(cpus[node * share : (node + 1) * share]) for node in range(nodes)]


def plan_cluster(
    base: NodeConfig,
    counts: Counts,
    *,
    ports: Sequence[int],
    cpus: Sequence[int],
    secret: str,
    fixed: frozenset[str] = frozenset(),
) -> list[NodePlan]:
    """Every node of the cluster, those that clients talk to first.

    `ports`: one a node. `cpus`: those to divide. `secret`: used where `base` has none. `fixed`: keys that
    the user has set, which are kept for every node: with `engine.cpus` among them nothing is divided, with
    `engine.threads` only the CPUs are.
    """
    names: list[tuple[str, Role]] = [(f"decode-{i}", "decode") for i in range(counts.decode)]
    names += [(f"both-{i}", "both") for i in range(counts.both)]
    names += [(f"prefill-{i}", "prefill") for i in range(counts.prefill)]
    # A wildcard address is one to listen on, not one to reach.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(base.server.host, base.server.host)
    urls = [f"http://{f'[{host}]' if ':' in host else host}:{port}" for port in ports]
    peers = tuple(url for url, (_, role) in zip(urls, names, strict=True) if role == "prefill")
    prefix = f"{base.cluster.node_id}-" if base.cluster.node_id else ""
    plans = []
    for (name, role), url, port, share in zip(
        names, urls, ports, divide_cpus(cpus, counts.total), strict=True
    ):
        config = NodeConfig(
            server=msgspec.structs.replace(base.server, port=port),
            model=base.model,
            engine=_with_cpus(msgspec.structs.replace(base.engine, role=role), share, fixed),
            cluster=msgspec.structs.replace(
                base.cluster,
                prefill_peers=peers if role == "decode" else (),
                secret=base.cluster.secret or secret,
                node_id=prefix + name,
            ),
            fabric=base.fabric,
            observe=base.observe,
        )
        plans.append(NodePlan(name, role, url, check(config)))
    return plans


def _with_cpus(engine: EngineConfig, share: tuple[int, ...] | None, fixed: frozenset[str]) -> EngineConfig:
    if share is None or "engine.cpus" in fixed:
        return engine
    if "engine.threads" not in fixed:
        return msgspec.structs.replace(engine, cpus=share, threads=len(share))
    return msgspec.structs.replace(engine, cpus=share) if len(share) >= engine.threads else engine
