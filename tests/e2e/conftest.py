"""The models that end-to-end tests serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.config import cache_directory
from pdserve.models.default import ensure_default_model
from tests.e2e.cluster import running_cluster
from tests.e2e.pair import KEY, Pair, pair_configs
from tests.e2e.tiny import write_tiny_model

_AGREEMENT = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def transformers_agreement(request: pytest.FixtureRequest) -> list[str]:
    """Lines about how well outputs agree with transformers', listed at the end of the run."""
    return request.config.stash.setdefault(_AGREEMENT, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(_AGREEMENT, []):
        terminalreporter.section("agreement with transformers")
        for line in sorted(lines):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """SmolLM2-135M-Instruct, converted."""
    return ensure_default_model(cache_directory())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """A deeper one than `tiny`, for tests that tell layers apart."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"), default_model, seed=2, layers=6)


@pytest.fixture(scope="session")
def tiny(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama (tests.e2e.tiny): its nodes start in a second or two."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), default_model)


@pytest.fixture(scope="session")
def other_tiny(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape."""
    return write_tiny_model(tmp_path_factory.mktemp("other-tiny"), default_model, seed=1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tiny: Path) -> AsyncIterator[Pair]:
    """One prefill and one decode node (tests.e2e.pair). Whoever uses them leaves them idle."""
    prefill, decode = pair_configs(tiny)
    async with running_cluster(prefill=[prefill], decode=[decode], gate=True, key=KEY) as cluster:
        yield Pair(cluster)
