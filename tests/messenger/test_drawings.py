"""The page with the state diagrams is what the tables say."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from pdserve.messenger import decode_table, prefill_table
from pdserve.messenger.decode import DecodeMachine
from pdserve.messenger.prefill import PrefillMachine

ROOT = Path(__file__).resolve().parents[2]


def test_diagrams_are_not_stale() -> None:
    tool = ROOT / "tools" / "draw_machines"
    result = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("module", "machine"), [(decode_table, DecodeMachine), (prefill_table, PrefillMachine)]
)
def test_tables_are_total_and_name_real_actions(module: Any, machine: type) -> None:
    pairs = {(state, happening) for state in module.State for happening in module.Happening}
    assert set(module.TRANSITIONS) == pairs
    for rule in module.TRANSITIONS.values():
        assert callable(getattr(machine, rule.action))
        assert isinstance(rule.to, tuple)
        assert all(isinstance(state, Enum) for state in rule.to)


@pytest.mark.parametrize("module", [decode_table, prefill_table])
def test_every_state_can_be_reached_and_left(module: Any) -> None:
    first = next(iter(module.State))
    arrows = {
        (start, to) for (start, _), rule in module.TRANSITIONS.items() for to in rule.to if to is not start
    }
    assert {to for _, to in arrows} | {first} == set(module.State)
    assert set(module.State) - {start for start, _ in arrows} == set(module.FINAL)
