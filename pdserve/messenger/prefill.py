"""The prefill side's machine (API; transitions follow)."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.messenger.events import Effect, Event
from pdserve.messenger.facts import NodeFacts


@dataclass(frozen=True)
class PrefillConfig:
    node: NodeFacts
    group: int = 0
    """Which of this node's groups computes for the peers."""
    heartbeat_s: float = 0.25
    dead_s: float = 2.0
    pause_s: float = 1.0
    retry_after_s: float = 1.0
    story: int = 512


class PrefillMachine:
    """Prefill -> Enqueue -> PostWrites ... -> Quiet and Release."""

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config

    def handle(self, event: Event, now: float) -> list[Effect]:
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        raise NotImplementedError

    def statistics(self) -> dict[str, int | float]:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """No work, no outstanding batch."""
        raise NotImplementedError
