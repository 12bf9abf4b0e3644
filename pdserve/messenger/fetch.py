"""What the decode machine keeps of a submitted request, and of a link to a prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.messenger.decode_table import State
from pdserve.messenger.events import LinkUp, Submit
from pdserve.messenger.facts import NodeFacts
from pdserve.messenger.liveness import Liveness
from pdserve.messenger.machine import PeerLink
from pdserve.messenger.messages import Rejected
from pdserve.messenger.runs import TransferPlan
from pdserve.messenger.slots import Slot


@dataclass(frozen=True)
class DecodeConfig:
    node: NodeFacts
    heartbeat_s: float = 0.25
    dead_s: float = 2.0
    cancel_s: float = 5.0
    """How long a Cancel may stay unanswered before its link is fenced."""
    settle_s: float = 2.0
    """How long slots may stay short of what Quiet says was posted before the link is fenced."""
    pause_s: float = 0.5
    """A gap between two calls of `handle` longer than this means that we were paused."""
    retry_after_s: float = 1.0
    slots: int = 4096
    story: int = 512


class DecodeLink(PeerLink):
    """A link to a prefill node. Once not `up` it is being fenced, and goes with `Fenced`."""

    def __init__(self, event: LinkUp, liveness: Liveness) -> None:
        super().__init__(event, liveness)
        self.fetches: dict[str, Fetch] = {}
        self.plans: dict[int, TransferPlan] = {}
        """By our group: how that peer's pages come to it. Only its counts are used on this side."""
        self.asked_tokens = 0
        """Asked since its load was last told."""
        self.turn = 0
        """When it was last chosen."""


class Fetch:
    """One submitted request, in its latest attempt."""

    def __init__(self, submit: Submit, expires: float | None) -> None:
        self.submit = submit
        self.state = State.NEW
        self.ended = False
        """Its user waits no longer."""
        self.expires = expires
        self.due: float | None = None
        self.attempt = 0
        self.link: DecodeLink | None = None
        self.slots: list[Slot] = []
        self.expected: list[int] = []
        self.counted: list[int] = []
        self.posted: list[int] | None = None
        self.tried: set[str] = set()
        self.rejections: list[Rejected] = []

    @property
    def request(self) -> str:
        return self.submit.request

    def missing(self) -> int:
        """Runs not counted yet, of those expected."""
        return sum(self.expected) - sum(self.counted)
