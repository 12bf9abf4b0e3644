"""What a node says of its fabric at start."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdserve.errors import FabricError
from pdserve.fabric import Fabric, FabricConfig, Topology
from pdserve.fabric.measure import Path
from pdserve.fabric.topology import Nic, NicKind
from pdserve.node.self_test import idle_rdma, self_test

CARDS = (
    Nic("mlx5_0", NicKind.CONNECTX, rdma_device="mlx5_0"),
    Nic("0000:05:00.0", NicKind.EFA, active=False),
)


async def start(topology: Topology, *, measure: bool) -> float | None:
    async with Fabric.open(FabricConfig()) as fabric:
        pump = asyncio.create_task(fabric.run())
        gbs = await self_test(fabric, topology, measure=measure)
        assert fabric.statistics()["ports"] == 0
        await fabric.close()
        await pump
    return gbs


async def test_the_path_and_its_speed_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gbs = await start(Topology(), measure=True)
    assert gbs is not None
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.message.startswith("fabric: tcp on lo by libfabric ")
    assert record.message.endswith(f"mode thread, {gbs:.2f} GB/s in pages of 64 KiB with itself")


async def test_without_measuring(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert await start(Topology(), measure=False) is None
    assert caplog.messages[0].endswith("mode thread, not measured")


async def test_idle_rdma_hardware_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    await start(Topology(nics=CARDS), measure=False)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.message == (
        "RDMA hardware is present but unused: 1 ConnectX, 1 EFA (mlx5_0, 0000:05:00.0), while KV cache goes "
        "over 'tcp', which is many times slower (fabric.provider)"
    )


async def test_a_failed_measurement_does_not_stop_the_node(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> float:
        raise FabricError("nothing arrived")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Path, "bandwidth", fail)
    assert await start(Topology(), measure=True) is None
    assert caplog.messages[0] == "the self-test of the fabric failed: nothing arrived"
    assert caplog.messages[1].endswith("failed its self-test")


@pytest.mark.parametrize("provider", ["efa", "efa-direct", "verbs", "verbs;ofi_rxm"])
def test_rdma_providers_leave_nothing_idle(provider: str) -> None:
    assert idle_rdma(Topology(nics=CARDS), provider) is None


@pytest.mark.parametrize("provider", ["tcp", "sockets", "shm"])
def test_without_rdma_hardware_there_is_nothing_to_say(provider: str) -> None:
    assert idle_rdma(Topology(nics=(Nic("eth0", NicKind.ETHERNET, netdevs=("eth0",)),)), provider) is None
