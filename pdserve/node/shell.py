"""What runs a pure state machine: feed it events, perform its effects in order, keep its one timer.

A subclass performs effects. An effect's outcome comes back as an event, now or later; an event that arrives
while effects are being performed waits its turn, so effects of one machine never interleave.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from pdserve.messenger.events import Effect, Event, Timer
from pdserve.messenger.messages import Load

Crash = Callable[[BaseException], None]
"""Ends the node with this cause: for faults in loop callbacks, which no task would see."""

Spawn = Callable[[Coroutine[Any, Any, None], str], object]
"""Run a coroutine in the node's task group, under this name."""


class Machine(Protocol):
    """A pure state machine (STYLE: `handle(event, now) -> list[Effect]`)."""

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def next_deadline(self) -> float | None: ...


class MachineShell(ABC):
    """Runs one machine on the running loop. Everything is called on that loop."""

    def __init__(self, machine: Machine, crash: Crash) -> None:
        self._machine = machine
        self._crash = crash
        self._events: deque[Event] = deque()
        self._performing = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._closed = False

    @abstractmethod
    def perform(self, effect: Effect) -> None:
        """Do what the machine asks. Must not raise for what the outside world does: that is an event."""

    @abstractmethod
    def load(self) -> Load:
        """This node's load, for heartbeats."""

    def feed(self, event: Event) -> None:
        """Hand the machine an event and perform what follows. A fault in either ends the node."""
        if self._closed:
            return
        self._events.append(event)
        if self._performing:
            return
        self._performing = True
        try:
            while self._events:
                for effect in self._machine.handle(self._events.popleft(), time.monotonic()):
                    self.perform(effect)
        except Exception as error:
            self._events.clear()
            self._crash(error)
        finally:
            self._performing = False
        self._arm()

    def close(self) -> None:
        """Stop the timer; later events are ignored. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        deadline = None if self._closed else self._machine.next_deadline()
        if deadline == self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expired)

    def _expired(self) -> None:
        self._timer = None
        self.feed(Timer(load=self.load()))
