"""Which nodes `up` starts, and what each is told."""

from __future__ import annotations

import pytest

from pdserve.cli.cluster import Counts, count_nodes, divide_cpus, plan_cluster
from pdserve.config import ClusterConfig, EngineConfig, NodeConfig, ServerConfig
from pdserve.errors import ConfigError

SECRET = "s" * 64


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        ((None, None, 0), Counts(1, 1, 0)),
        ((2, None, 0), Counts(2, 1, 0)),
        ((None, 3, 0), Counts(1, 3, 0)),
        ((None, None, 2), Counts(0, 0, 2)),
        ((1, 1, 1), Counts(1, 1, 1)),
        ((0, 0, 1), Counts(0, 0, 1)),
    ],
)
def test_counts(asked: tuple[int | None, int | None, int], counts: Counts) -> None:
    assert count_nodes(*asked) == counts


@pytest.mark.parametrize("asked", [(0, 1, 0), (1, 0, 0), (0, 0, 0), (0, None, 1)])
def test_useless_counts_are_refused(asked: tuple[int | None, int | None, int]) -> None:
    with pytest.raises(ConfigError):
        count_nodes(*asked)


def test_cpus_are_divided_evenly_or_not_at_all() -> None:
    assert divide_cpus([0, 1], 2) == [(0,), (1,)]
    assert divide_cpus([2, 3, 8, 9, 11], 2) == [(2, 3), (8, 9)]
    assert divide_cpus([0, 1], 3) == [None, None, None]


def plan(base: NodeConfig, counts: Counts = Counts(1, 2, 1), cpus: int = 4, **options: frozenset[str]):  # type: ignore[no-untyped-def]  # noqa: B008
    ports = range(9000, 9000 + counts.total)
    return plan_cluster(base, counts, ports=ports, cpus=range(cpus), secret=SECRET, **options)


def test_each_node_knows_its_role_port_peers_and_cores() -> None:
    plans = plan(NodeConfig(cluster=ClusterConfig(segment_tokens=1024)))
    assert [(p.name, p.role, p.url) for p in plans] == [
        ("decode-0", "decode", "http://127.0.0.1:9000"),
        ("decode-1", "decode", "http://127.0.0.1:9001"),
        ("both-0", "both", "http://127.0.0.1:9002"),
        ("prefill-0", "prefill", "http://127.0.0.1:9003"),
    ]
    for p in plans:
        assert p.config.engine.role == p.role
        assert p.url.endswith(str(p.config.server.port))
        assert p.config.cluster.secret == SECRET
        assert p.config.cluster.node_id == p.name
        assert p.config.cluster.segment_tokens == 1024
        peers = ("http://127.0.0.1:9003",) if p.role == "decode" else ()
        assert p.config.cluster.prefill_peers == peers
    assert [p.config.engine.cpus for p in plans] == [(0,), (1,), (2,), (3,)]


def test_more_cores_are_more_threads_unless_the_user_said_otherwise() -> None:
    counts = Counts(1, 1, 0)
    assert [p.config.engine.threads for p in plan(NodeConfig(), counts)] == [2, 2]
    base = NodeConfig(engine=EngineConfig(threads=1))
    kept = plan(base, counts, fixed=frozenset({"engine.threads"}))
    assert [(p.config.engine.threads, p.config.engine.cpus) for p in kept] == [(1, (0, 1)), (1, (2, 3))]
    many = plan(NodeConfig(engine=EngineConfig(threads=4)), counts, fixed=frozenset({"engine.threads"}))
    assert [(p.config.engine.threads, p.config.engine.cpus) for p in many] == [(4, None), (4, None)]
    pinned = plan(NodeConfig(engine=EngineConfig(cpus=(3,))), counts, fixed=frozenset({"engine.cpus"}))
    assert [(p.config.engine.threads, p.config.engine.cpus) for p in pinned] == [(1, (3,)), (1, (3,))]


def test_too_few_cores_are_left_to_the_kernel() -> None:
    assert {(p.config.engine.threads, p.config.engine.cpus) for p in plan(NodeConfig(), cpus=2)} == {
        (1, None)
    }


def test_a_wildcard_address_is_reached_by_loopback_and_a_secret_of_the_user_is_kept() -> None:
    base = NodeConfig(
        server=ServerConfig(host="0.0.0.0"), cluster=ClusterConfig(secret="u" * 20, node_id="rack1")
    )
    plans = plan(base)
    assert plans[0].url == "http://127.0.0.1:9000"
    assert plans[0].config.server.host == "0.0.0.0"
    assert plans[0].config.cluster.secret == "u" * 20
    assert plans[0].config.cluster.node_id == "rack1-decode-0"
