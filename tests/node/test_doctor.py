"""doctor: findings from facts, peers as they are, and the command itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from pdserve.cli.main import main
from pdserve.config import ClusterConfig, EngineConfig, FabricConfig, NodeConfig
from pdserve.fabric import Topology, assign, open_handles
from pdserve.fabric.measure import PathFigures
from pdserve.fabric.providers import Offer
from pdserve.fabric.topology import AcsBridge, Cpu, Gpu, HugePages, Nic, NicKind, NumaNode, Pci
from pdserve.node.doctor.facts import Facts, LibraryFacts, Limits, PathFacts
from pdserve.node.doctor.findings import notes, problems, size
from pdserve.node.doctor.peers import PeerFacts, ask
from pdserve.node.doctor.report import as_json, as_lines, cpulist
from pdserve.node.hello_server import HelloServer
from tests.fabric.topology.machines import dual_socket, virtual_machine

# ---- findings: one fact changed, one sentence more ----

CHAIN = ("pci0000:10", "0000:10:01.0", "0000:11:00.0")
CARD = Nic(
    "mlx5_0", NicKind.CONNECTX, Pci("0000:12:00.0", CHAIN, 0), "mlx5_0", link_layer="InfiniBand", gbps=400.0
)
GPU = Gpu(Pci("0000:13:00.0", CHAIN, 0), "0x2330")
MACHINE = Topology(
    gpus=(GPU,),
    nics=(CARD,),
    nodes=(NumaNode(0, (0, 1, 2, 3), 0),),
    cpus=tuple(Cpu(n, (n,), 0) for n in range(4)),
    online=4,
    huge_pages=(HugePages(2 << 20, 64, 64),),
    acs=(AcsBridge("0000:10:01.0", False),),
)
TCP = Offer("tcp", "127.0.0.1/32", "lo", "RDM", "2.5.1", True)
VERBS = Offer("verbs", "IB-0xfe80000000000000", "mlx5_0", "MSG", "2.5.1", True)
FIGURES = PathFigures("verbs", "mlx5_0", 4.0, {65536: 40.0, 1 << 20: 45.0}, 1.0)


def facts(topology: Topology = MACHINE, ranks: int = 1, **changes: Any) -> Facts:
    """A machine on which all is well."""
    return replace(
        Facts(
            NodeConfig(),
            LibraryFacts("/usr/lib/libfabric.so.1", "2.5", (TCP, VERBS)),
            topology,
            assign(topology, ranks),
            Limits(None, False, 65536),
            (PathFacts("verbs", "10.0.0.1", FIGURES),),
        ),
        **changes,
    )


def machine(**changes: Any) -> Facts:
    return facts(replace(MACHINE, **changes))


def peer(**changes: Any) -> Facts:
    fields: dict[str, Any] = {"url": "http://127.0.0.1:8001", "live": True, "ready": True, "hello": True}
    return facts(peers=(PeerFacts(**{**fields, **changes}),))


def test_all_is_well() -> None:
    well = peer(role="prefill", provider="verbs")
    assert problems(well) == notes(well) == []
    lines = as_lines(well)
    assert lines[-1] == "all is well"
    assert lines[0] == "libfabric: 2.5 at /usr/lib/libfabric.so.1"
    assert "  mlx5_0, ConnectX, 0000:12:00.0, NUMA 0, InfiniBand, 400 Gb/s" in lines
    assert "rank 0: 0000:13:00.0, mlx5_0 (same PCI switch), worker CPUs 0-2, poller CPU 3" in lines
    assert (
        "path verbs on 10.0.0.1 (mlx5_0), with itself: round trip 4 us, 40.00 GB/s in pages of 64 KiB, "
        "45.00 GB/s in pages of 1 MiB, fence 1.00 ms"
    ) in lines
    assert "peer http://127.0.0.1:8001: prefill, ready, fabric verbs, hello yes" in lines


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            facts(
                replace(MACHINE, nics=()), library=LibraryFacts(error="libfabric can't be loaded"), paths=()
            ),
            "can't be loaded",
        ),
        (facts(paths=(PathFacts("tcp", "127.0.0.1", FIGURES),)), "present but unused: 1 ConnectX"),
        (facts(library=LibraryFacts("/lib", "2.5", (TCP,))), "does not offer 'verbs'"),
        (machine(nics=(replace(CARD, rdma_device=None),)), "no driver offers RDMA on 1 ConnectX"),
        (machine(nics=(replace(CARD, active=False),)), "none of the RDMA devices has a link: mlx5_0"),
        (facts(limits=Limits(8 << 20, False, 65536)), "limited to 8 MiB (ulimit -l)"),
        (facts(limits=Limits(None, False, 256)), "open files are limited to 256"),
        (
            facts(paths=(PathFacts("verbs", "10.0.0.1", error="FI_ENODATA"),)),
            "verbs on 10.0.0.1 does not work",
        ),
        (peer(error="Connection refused"), "can't be reached: Connection refused"),
        (peer(live=False, ready=False, reason="stuck"), "should be restarted: stuck"),
        (peer(ready=False, reason="the model is loading"), "is not ready: the model is loading"),
        (peer(hello=False, hello_error="it takes no hello"), "can't be linked to: it takes no hello"),
        (peer(url="http://10.0.0.7:8000"), "fabric.host = 127.0.0.1 is an address that only this one can"),
    ],
)
def test_each_problem_is_one_sentence(found: Facts, words: str) -> None:
    (problem,) = problems(found)
    assert words in problem
    assert "\n" not in problem
    assert f"problem: {problem}" in as_lines(found)
    assert as_lines(found)[-1] == "1 problem"
    assert as_json(found)["ok"] is False


@pytest.mark.parametrize(
    "found",
    [
        # Without RDMA hardware nothing is pinned, so the limit does not matter.
        facts(replace(MACHINE, nics=()), limits=Limits(1, False, 9999)),
        facts(limits=Limits(8 << 20, True, 65536)),
        facts(
            limits=Limits(8 << 20, False, 65536),
            config=NodeConfig(engine=EngineConfig(kv_cache_memory_bytes=1 << 20)),
        ),
        facts(
            config=NodeConfig(fabric=FabricConfig(host="10.0.0.1")),
            peers=(PeerFacts("http://10.0.0.7:8000", True, True, hello=True),),
        ),
    ],
)
def test_no_problem(found: Facts) -> None:
    assert problems(found) == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (machine(huge_pages=(HugePages(2 << 20, 0, 0),)), "no huge pages are reserved"),
        (machine(acs=(AcsBridge("0000:10:01.0", True),)), "ACS on 1 PCI bridges (0000:10:01.0 first)"),
        (machine(acs=(AcsBridge("0000:10:01.0", None),)), "can't be read: only root may"),
        (
            machine(gpus=(replace(GPU, pci=replace(GPU.pci, iommu_group=3, iommu_type="DMA-FQ")),)),
            "an IOMMU translates the DMA of 1 GPUs",
        ),
        (
            machine(nics=(CARD, replace(CARD, name="mlx5_1", pci=Pci("0000:90:00.0", ("pci0000:90",), 0)))),
            "1 ConnectX nearest to no rank, left to others: mlx5_1",
        ),
        (
            machine(nics=(CARD, replace(CARD, name="mlx5_1", active=False))),
            "RDMA devices without a link: mlx5_1",
        ),
        (
            machine(nics=(replace(CARD, pci=Pci("0000:90:00.0", ("pci0000:90",), 1)),)),
            "rank 0 has no NIC near it: mlx5_0 is across the system",
        ),
        (machine(cpus=MACHINE.cpus[:2]), "may use 2 of 4 CPUs"),
        (facts(ranks=5), "5 ranks and 4 CPUs"),
        (facts(ranks=4), "some ranks have only one CPU"),
        (facts(Topology()), "no NIC has a link"),
    ],
)
def test_each_note_is_one_sentence(found: Facts, words: str) -> None:
    assert [note for note in notes(found) if words in note]
    assert not any("\n" in note for note in notes(found))
    assert problems(found) == []


def test_the_object_has_plain_keys() -> None:
    found = as_json(peer())
    assert json.loads(json.dumps(found)) == found
    assert found["ok"] is True
    assert found["paths"] == [
        {
            "provider": "verbs",
            "host": "10.0.0.1",
            "domain": "mlx5_0",
            "round_trip_us": 4.0,
            "gb_per_s_64k": 40.0,
            "gb_per_s_1m": 45.0,
            "fence_ms": 1.0,
            "error": None,
        }
    ]
    assert found["ranks"][0]["nics"] == ["mlx5_0"]
    assert found["ranks"][0]["distance"] == "same PCI switch"


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 512, 65536, 3 << 29)] == ["0 B", "512 B", "64 KiB", "1.5 GiB"]
    assert cpulist((3, 0, 1, 2, 8)) == "0-3,8"
    assert cpulist(()) == "none"


# ---- peers ----

Serve = Callable[[web.Application], Any]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves applications on free ports until the end of the test; gives their URLs."""
    runners: list[web.AppRunner] = []

    async def start(app: web.Application) -> str:
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def node_app(*, ready: bool = True, hello: bool = True) -> web.Application:
    """Health as nodes answer it, and the real end of a hello."""

    async def health(request: web.Request) -> web.Response:
        good = ready or request.path == "/live"
        body = {
            "status": "ok",
            "ready": ready,
            "live": True,
            "reason": "" if ready else "the model is loading",
            "detail": {"role": "prefill", "node": "p", "provider": "tcp"},
        }
        return web.json_response(body, status=200 if good else 503)

    app = web.Application()
    app.router.add_get("/live", health)
    app.router.add_get("/health", health)
    if hello:
        HelloServer(b"a secret that doctor does not need").add_routes(app)
    return app


async def test_peers_as_they_are(serve: Serve) -> None:
    urls = [
        await serve(node_app()),
        await serve(node_app(ready=False)),
        await serve(node_app(hello=False)),
        "http://127.0.0.1:1",
    ]
    well, loading, no_prefill, nobody = await ask(urls)
    assert well == PeerFacts(urls[0], True, True, "", "prefill", "tcp", True)
    assert (loading.live, loading.ready, loading.reason) == (True, False, "the model is loading")
    assert loading.hello
    assert no_prefill.hello_error == "it takes no hello: it is no prefill node"
    assert nobody == PeerFacts("http://127.0.0.1:1", error="Connection refused")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1, 2]", b'{"ready": 1}', b"{" * 2_000_000])
async def test_strangers_are_named_as_such(serve: Serve, body: bytes) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    url = await serve(app)
    assert await ask([url]) == [PeerFacts(url, error="what listens there is no pdserve node")]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 200, "can't be read"),
        (b"\xff" * 100, 200, "can't be read"),
        (b"busy", 503, "was 503: busy"),
        (b"\x93\xafchallenge_reply\xc4\x20" + bytes(32) + b"\x63", 200, "protocol version 99"),
    ],
)
async def test_bad_answers_to_a_challenge(serve: Serve, body: bytes, status: int, words: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    app = node_app(hello=False)
    app.router.add_post("/pd/v1/challenge", answer)
    (found,) = await ask([await serve(app)])
    assert words in found.hello_error
    assert found.ready


# ---- the command ----


class TestCommand:
    def test_all_is_well_on_a_plain_machine(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        tree, out = virtual_machine(tmp_path / "sys"), tmp_path / "doctor.json"
        assert main(["doctor", "--sysfs", str(tree), "--json", str(out)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "all is well"
        found = json.loads(out.read_text())
        assert found["ok"] is True
        assert found["problems"] == []
        assert found["libfabric"]["version"]
        assert "tcp" in {offer["provider"] for offer in found["providers"]}
        assert [nic["name"] for nic in found["nics"]] == ["eth0"]
        (path,) = found["paths"]
        assert path["provider"] == "tcp"
        for key in ("round_trip_us", "gb_per_s_64k", "gb_per_s_1m", "fence_ms"):
            assert path[key] > 0
        assert open_handles() == 0

    def test_problems_are_lines_and_status_1(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tree = dual_socket(tmp_path / "sys")
        words = ["--no-measure", "--ranks", "2", "--prefill-peer", "http://127.0.0.1:1"]
        assert main(["doctor", "--sysfs", str(tree), *words]) == 1
        lines = capsys.readouterr().out.splitlines()
        found = [line for line in lines if line.startswith("problem: ")]
        assert found[0].startswith(
            "problem: RDMA hardware is present but unused: 2 ConnectX (mlx5_0, mlx5_1)"
        )
        assert found[-1].endswith("http://127.0.0.1:1 can't be reached: Connection refused")
        assert lines[-1] == f"{len(found)} problems"
        assert "rank 1: CPU, mlx5_1 (same NUMA node), worker CPUs 16-30, poller CPU 31" in lines

    def test_peers_of_the_configuration_are_asked(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "decode.toml"
        file.write_text('[engine]\nrole = "decode"\n[cluster]\nprefill_peers = ["http://127.0.0.1:1"]\n')
        assert main(["doctor", "--config", str(file), "--no-measure"]) == 1
        assert capsys.readouterr().out.count("peer http://127.0.0.1:1: unreachable") == 1

    def test_a_path_that_cannot_be_opened(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "node.toml"
        file.write_text(
            '[fabric]\nhost = "192.0.2.77"\n[cluster]\nsecret = "sixteen characters"\n'
            '[engine]\nrole = "prefill"\n'
        )
        assert main(["doctor", "--config", str(file)]) == 1
        assert "problem: the path over tcp on 192.0.2.77 does not work" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("words", "error"),
        [
            (["--ranks", "0"], "--ranks = 0"),
            (["--prefill-peer", "127.0.0.1:8000"], "--prefill-peer = '127.0.0.1:8000'"),
            (["--config", "/nonexistent.toml"], "/nonexistent.toml: cannot be read"),
            (["--fabric-host", "0.0.0.0"], "fabric.host"),
        ],
    )
    def test_bad_usage_is_status_2(
        self, capsys: pytest.CaptureFixture[str], words: list[str], error: str
    ) -> None:
        assert main(["doctor", *words]) == 2
        assert error in capsys.readouterr().err


def test_configured_peers_need_no_secret_here() -> None:
    """`facts` of a node with peers: nothing of its secret gets into the report."""
    config = NodeConfig(cluster=ClusterConfig(secret="sixteen characters"))
    assert "sixteen characters" not in json.dumps(as_json(facts(config=config)))
