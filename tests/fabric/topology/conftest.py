"""The machines' trees, each written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from pdserve.fabric import Topology, read_topology
from tests.fabric.topology.machines import MACHINES

Machine = Callable[[str], Topology]


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """The topology of one of `MACHINES`, as read from its tree."""

    @cache
    def read(name: str) -> Topology:
        return read_topology(MACHINES[name](tmp_path_factory.mktemp("machine") / "sys"))

    return read


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Where a test may write a tree of its own."""
    return tmp_path / "sys"
