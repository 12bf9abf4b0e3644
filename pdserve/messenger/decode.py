"""The decode side's machine (API; transitions follow)."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.messenger.events import Effect, Event
from pdserve.messenger.facts import NodeFacts


@dataclass(frozen=True)
class DecodeConfig:
    node: NodeFacts
    heartbeat_s: float = 0.25
    dead_s: float = 2.0
    cancel_s: float = 5.0
    """How long a Cancel may stay unanswered before its link is fenced."""
    settle_s: float = 2.0
    """How long slots may stay short of what Quiet says was posted before the link is fenced."""
    pause_s: float = 1.0
    """A longer gap between two calls of `handle` than this past the deadline means that we were paused."""
    retry_after_s: float = 1.0
    slots: int = 4096
    story: int = 512


class DecodeMachine:
    """Submit -> Ready, or Failed and PagesSafe. Sole owner of the imm slots of this process."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config

    def handle(self, event: Event, now: float) -> list[Effect]:
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When `handle(Timer())` is due next; None while nothing waits for time."""
        raise NotImplementedError

    def statistics(self) -> dict[str, int | float]:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """No request, no quarantined page, no armed slot."""
        raise NotImplementedError
