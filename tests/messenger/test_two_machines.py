"""Both machines joined by a wire and a fabric that do anything a real one may do."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .world import World

CHOICES = st.lists(st.integers(0, 1 << 30), min_size=1, max_size=250)


def run(world: World, choices: list[int]) -> None:
    for choice in choices:
        world.do(choice)
    world.settle()
    world.check_ended()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(choices=CHOICES)
def test_any_history_ends_well(choices: list[int]) -> None:
    run(World(), choices)


@pytest.mark.parametrize("seed", range(60))
def test_long_histories(seed: int) -> None:
    draw = random.Random(seed)
    world = World(
        tps=draw.choice([(1,), (1, 2), (2, 1, 2)]),
        decode_tp=draw.choice([1, 2]),
        landing=draw.choice([1, 4]),
        trouble=draw.choice([1, 8, 30]),
    )
    run(world, [draw.randrange(1 << 30) for _ in range(500)])


def test_quiet_histories_are_all_ready() -> None:
    world = World()
    for tokens in (2, 3, 4, 5, 6, 9, 11):
        world.submit(tokens)
        world.settle()
        world.calm = False
    world.check_ended()
    assert set(world.ended.values()) == {"ready"}
    assert len(world.ended) == 7
