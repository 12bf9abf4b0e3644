"""The rank's side of the layer counter: tick, wake the node, hold at the test gate.

    plan of step s   layer 0 .. layer l .. layer L-1   final norm
    ticks                  |          |           |            |      L + 1 of them
    counter       s(L+1) + 1      l+1           L            L+1

After each tick: poke the eventfd (only a plan with `send` has a reader), then hold while the gate says so.
The poke comes first, so that a node sees the layer it has held the worker after.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from pdserve.engine.plan import Plan
from pdserve.errors import WorkerError
from pdserve.memory.counter import LayerCounter

_NAP_S = 0.0005


class LayerTicks:
    """Makes the ticks of each step. `layer_done` is the model runner's `on_layer`."""

    def __init__(
        self,
        counter: LayerCounter,
        event_fd: int,
        layers: int,
        *,
        while_held: Callable[[], None] | None = None,
        early: bool = False,
    ) -> None:
        """Borrows counter and eventfd.

        `while_held`: None ignores the gate; else it is called every half millisecond while the rank holds,
        and what it raises ends the hold (the node has gone). `early`: the planted fault "early_tick".
        """
        self._counter = counter
        self._event_fd = event_fd
        self._layers = layers
        self._while_held = while_held
        self._early = early
        self._send = False
        self._expected = 0

    def begin(self, plan: Plan) -> None:
        """Before the plan runs. Raises WorkerError for a step out of turn: its ticks would be another's."""
        due = self._counter.value // (self._layers + 1)
        if plan.step != due:
            raise WorkerError(f"step {plan.step} came where step {due} was due")
        self._send = plan.send
        self._expected = (plan.step + 1) * (self._layers + 1)
        if self._early:
            self._tick()

    def layer_done(self, layer: int) -> None:
        """Layer `layer` has written its KV and its attention output; `layers` stands for the final norm."""
        if not self._early or layer < self._layers:
            self._tick()

    def end(self) -> None:
        """After the plan ran. Raises WorkerError when the runner missed a layer or called one twice."""
        value = self._counter.value
        if value != self._expected:
            raise WorkerError(f"the layer counter is at {value} after the step, expected {self._expected}")

    def _tick(self) -> None:
        value = self._counter.tick()
        if self._send:
            self._poke()
        if self._while_held is not None:
            while self._counter.hold_at == value:
                self._while_held()
                time.sleep(_NAP_S)

    def _poke(self) -> None:
        try:
            os.eventfd_write(self._event_fd, 1)
        except BlockingIOError:  # its count is full: the node has a wake-up waiting already
            pass
