"""A step's ticks: how many, when the eventfd is poked, where the gate holds, what the early fault does."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pdserve.engine.plan import Plan
from pdserve.errors import WorkerError
from pdserve.memory.counter import NO_GATE, LayerCounter
from pdserve.worker.ticks import LayerTicks

LAYERS = 4


@pytest.fixture
def counter() -> Iterator[LayerCounter]:
    with LayerCounter.create() as counter:
        yield counter


@pytest.fixture
def event_fd() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


def plan(step: int, *, send: bool = False) -> Plan:
    return Plan(step, [], [], [], [], send)


def run(ticks: LayerTicks, a_plan: Plan) -> None:
    ticks.begin(a_plan)
    for layer in range(LAYERS + 1):
        ticks.layer_done(layer)
    ticks.end()


def pokes(event_fd: int) -> int:
    try:
        return os.eventfd_read(event_fd)
    except BlockingIOError:
        return 0


def test_a_step_makes_a_tick_a_layer_and_one(counter: LayerCounter, event_fd: int) -> None:
    ticks = LayerTicks(counter, event_fd, LAYERS)
    for step in range(3):
        run(ticks, plan(step))
        assert counter.value == (step + 1) * (LAYERS + 1)
    assert pokes(event_fd) == 0


def test_only_a_step_that_sends_pokes(counter: LayerCounter, event_fd: int) -> None:
    ticks = LayerTicks(counter, event_fd, LAYERS)
    run(ticks, plan(0, send=True))
    run(ticks, plan(1))
    assert pokes(event_fd) == LAYERS + 1


def test_a_full_eventfd_is_no_error(counter: LayerCounter, event_fd: int) -> None:
    os.eventfd_write(event_fd, 2**64 - 2)
    run(LayerTicks(counter, event_fd, LAYERS), plan(0, send=True))
    assert counter.value == LAYERS + 1


def test_the_gate_holds_after_its_tick_until_it_moves(counter: LayerCounter, event_fd: int) -> None:
    naps: list[tuple[int, int]] = []

    def while_held() -> None:
        naps.append((counter.value, pokes(event_fd)))
        if len(naps) == 3:
            counter.hold_at = 4
        if len(naps) == 5:
            counter.hold_at = NO_GATE

    counter.hold_at = 2
    run(LayerTicks(counter, event_fd, LAYERS, while_held=while_held), plan(0, send=True))
    assert naps == [(2, 2), (2, 0), (2, 0), (4, 2), (4, 0)]
    assert counter.value == LAYERS + 1


def test_without_permission_the_gate_is_not_looked_at(counter: LayerCounter, event_fd: int) -> None:
    counter.hold_at = 1
    run(LayerTicks(counter, event_fd, LAYERS), plan(0))
    assert counter.value == LAYERS + 1


def test_a_node_that_goes_away_ends_the_hold(counter: LayerCounter, event_fd: int) -> None:
    def gone() -> None:
        raise ConnectionError

    counter.hold_at = 1
    with pytest.raises(ConnectionError):
        run(LayerTicks(counter, event_fd, LAYERS, while_held=gone), plan(0))


def test_the_early_fault_ticks_before_the_layer_and_as_often(counter: LayerCounter, event_fd: int) -> None:
    ticks = LayerTicks(counter, event_fd, LAYERS, early=True)
    ticks.begin(plan(0))
    seen = [counter.value]  # as layer 0 starts, then after each layer
    for layer in range(LAYERS + 1):
        ticks.layer_done(layer)
        seen.append(counter.value)
    ticks.end()
    assert seen == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("step", [0, 2, 7])
def test_a_step_out_of_turn_is_an_error(counter: LayerCounter, event_fd: int, step: int) -> None:
    """The counter's ticks belong to steps by number: after a gap a node would send the wrong pages."""
    ticks = LayerTicks(counter, event_fd, LAYERS)
    run(ticks, plan(0))
    with pytest.raises(WorkerError, match=f"step {step} came where step 1 was due"):
        ticks.begin(plan(step))


@pytest.mark.parametrize("calls", [LAYERS, LAYERS + 2])
def test_a_layer_too_few_or_too_many_is_an_error(counter: LayerCounter, event_fd: int, calls: int) -> None:
    ticks = LayerTicks(counter, event_fd, LAYERS)
    ticks.begin(plan(0))
    for layer in range(calls):
        ticks.layer_done(layer)
    with pytest.raises(WorkerError, match=f"is at {calls} after the step, expected {LAYERS + 1}"):
        ticks.end()
