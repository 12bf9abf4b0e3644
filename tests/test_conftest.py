"""The checks of conftest.py fail when they should: each planted fault is run in a pytest of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.config import load_config

ROOT = Path(__file__).parents[1]

FAULTS = {
    "task": (
        """
import asyncio
kept = []
async def test_fault():
    kept.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))
""",
        "left behind: task forgotten",
    ),
    "child": (
        """
import subprocess, sys
def test_fault():
    test_fault.child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
    stdin=subprocess.PIPE)
""",
        "left behind: child process",
    ),
    "blocking": (
        """
from pdserve.config import load_config
async def test_fault(tmp_path):
    (tmp_path / "node.toml").write_text("")
    load_config(tmp_path / "node.toml")
""",
        "Blocking call to",
    ),
    "warning": (
        """
import warnings
def test_fault():
    warnings.warn("careless")
""",
        "UserWarning: careless",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, tmp_path: Path) -> None:
    source, expected = FAULTS[fault]
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_fault.py").write_text(source)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert expected in run.stdout


class TestBothLoops:
    async def test_runs_on_each(self, request: pytest.FixtureRequest) -> None:
        loop = asyncio.get_running_loop()
        library = type(loop).__module__.partition(".")[0]
        assert request.node.name.endswith(f"[{library}]")


@pytest.mark.may_block("what the test is about")
async def test_blocking_can_be_allowed(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("")
    assert load_config(file).engine.page_size == 16
