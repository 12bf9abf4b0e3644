"""Measuring a path: figures come out, failures are FabricErrors, and nothing is left open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from pdserve.fabric import Fabric, FabricConfig, FabricError, open_handles
from pdserve.fabric import measure as module
from pdserve.fabric.measure import measure, open_path
from pdserve.fabric.providers import providers


@asynccontextmanager
async def pumped(mode: str) -> AsyncIterator[Fabric]:
    async with Fabric.open(FabricConfig(mode=mode)) as fabric:  # type: ignore[arg-type]
        pump = asyncio.create_task(fabric.run())
        yield fabric
        await fabric.close()
        await pump


async def test_figures(mode: str) -> None:
    config = FabricConfig(mode=mode)  # type: ignore[arg-type]
    figures = await measure(config, pages=(64, 4096, 1 << 20, 4 << 20), seconds=0.01)
    assert (figures.provider, figures.domain) == ("tcp", "lo")
    assert list(figures.gbs) == [64, 4096, 1 << 20, 4 << 20]
    assert all(rate > 0 for rate in figures.gbs.values())
    assert figures.round_trip_us > 0
    assert figures.fence_ms > 0
    assert open_handles() == 0


async def test_a_fabric_with_itself(mode: str) -> None:
    async with pumped(mode) as fabric:
        async with open_path(fabric, fabric) as path:
            assert await path.bandwidth(65536, 0.01) > 0
            assert await path.round_trip(64, 0.01) > 0
        assert fabric.statistics()["ports"] == 0


async def test_what_arrives_is_what_was_written(mode: str) -> None:
    """The figures are of real transfers: both halves of the far arena hold the near one's bytes."""
    async with pumped(mode) as fabric, open_path(fabric, fabric) as path:
        size = module.ARENA_BYTES
        path._near.arena[:] = bytes(range(256)) * (size // 256)
        await path.bandwidth(65536, 0.0)
        assert path._far.arena[:] == path._near.arena[:]


async def test_a_path_that_breaks_is_an_error(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a lost peer or, where its provider says nothing, as silence."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    async with pumped(mode) as fabric, open_path(fabric, fabric) as path:
        await path.round_trip(64, 0.0)
        await path._far.port.close()
        with pytest.raises(FabricError):
            await path.bandwidth(65536, 1.0)


async def test_a_path_that_stalls_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pumps, so nothing arrives."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    async with Fabric.open(FabricConfig(mode="inline")) as fabric, open_path(fabric, fabric) as path:
        with pytest.raises(FabricError, match="nothing arrived over tcp") as caught:
            await path.bandwidth(65536, 1.0)
        assert caught.value.name == "FI_ETIMEDOUT"


async def test_cancelling_closes_everything(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of transfers."""
    started = asyncio.Event()

    async def flood(path: module.Path) -> float:
        path._write(0, 65536, 64)
        started.set()
        await asyncio.Event().wait()
        return 0.0

    monkeypatch.setattr(module.Path, "round_trip", flood)
    task = asyncio.create_task(measure(FabricConfig(mode=mode)))  # type: ignore[arg-type]
    await started.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert open_handles() == 0


async def test_an_address_that_is_not_here() -> None:
    with pytest.raises(FabricError, match=r"192\.0\.2\.77"):
        await measure(FabricConfig(host="192.0.2.77"))
    assert open_handles() == 0


def test_providers() -> None:
    offers = providers()
    assert len(set(offers)) == len(offers)
    ours = next(offer for offer in offers if (offer.provider, offer.endpoint) == ("tcp", "RDM"))
    assert ours.fits
    assert {"lo", ours.domain} <= {offer.domain for offer in offers}
    assert not any(offer.fits for offer in offers if offer.endpoint == "DGRAM")
