"""What both machines share: the shape of a transition table, links and their liveness, and the story.

A machine is called with events and returns effects (`events.py`). What happens to one request is looked up
in a table from (state, happening) to a `Rule`; the rule names the method that acts and the states it may
lead to, and a request that ends up elsewhere is a bug that raises. Tables are total: a pair that can't
happen says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import ClassVar, Generic, NamedTuple, TypeVar

from pdserve.errors import PdserveError, PeerLost
from pdserve.messenger.events import Drain, Effect, Event, LinkLost, LinkUp, Received, Send, Timer
from pdserve.messenger.facts import NodeFacts
from pdserve.messenger.liveness import Liveness, OwnTime
from pdserve.messenger.messages import Bye, Heartbeat, Load, Message

S = TypeVar("S", bound=Enum)


class Rule(NamedTuple, Generic[S]):
    """`action`: the machine's method that acts. `to`: where it may lead."""

    action: str
    to: tuple[S, ...]


class Story(NamedTuple):
    now: float
    event: Event
    effects: tuple[Effect, ...]


class PeerLink:
    """One link and what its peer said of itself. `up` ends for good when the link is lost or given up."""

    def __init__(self, event: LinkUp, liveness: Liveness) -> None:
        self.link = event.link
        self.node: NodeFacts = event.node
        self.load = event.load
        self.liveness = liveness
        self.up = True
        self.leaving = False
        """The peer said `Bye`: it gets no new work."""


L = TypeVar("L", bound=PeerLink)


class Machine(Generic[L]):
    """Base of both machines. Subclasses fill `_links` and say what a lost link means."""

    _handlers: ClassVar[Mapping[type[Event], str]] = {}

    def __init__(self, heartbeat_s: float, dead_s: float, pause_s: float, story: int) -> None:
        self._heartbeat_s = heartbeat_s
        self._dead_s = dead_s
        # Called every heartbeat at least; a gap must be longer than that to mean anything.
        self._time = OwnTime(max(pause_s, 2 * heartbeat_s))
        self._now = 0.0
        self._load = Load()
        self._links: dict[int, L] = {}
        self._effects: list[Effect] = []
        self.draining: str | None = None
        self.story: deque[Story] = deque(maxlen=story)
        """The last events with their effects, for dumps and replays."""
        self.counters = {"stale_messages": 0, "breaches": 0, "deaths": 0, "ignored_events": 0}

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do because of `event`, in order. Raises ValueError only for a caller's bug."""
        self._now = self._time.at(now)
        effects: list[Effect] = []
        self._effects = effects
        action: Callable[[Event], None] = getattr(self, self._handlers[type(event)])
        action(event)
        self.story.append(Story(now, event, tuple(effects)))
        return effects

    def next_deadline(self) -> float | None:
        """When `handle(Timer())` is due next, as `now`; None while nothing waits for time."""
        due = min((link.liveness.next_beat for link in self._links.values() if link.up), default=None)
        own = self._own_deadline()
        if own is not None and (due is None or own < due):
            due = own
        return None if due is None else due + self._time.paused

    # ---------------------------------------------------------------- links

    def _link_up(self, event: LinkUp) -> None:
        """The newest hello of a node wins: its older links are lost."""
        for old in list(self._links.values()):
            if old.up and old.node.node_id == event.node.node_id:
                self._lose(old, PeerLost(f"{old.node.node_id} said hello again"))
        link = self._make_link(event, Liveness(self._heartbeat_s, self._dead_s, self._now))
        self._links[event.link] = link
        self._beat(link)
        if self.draining is not None:
            self._send(link, Bye(self.draining))

    def _link_lost(self, event: LinkLost) -> None:
        link = self._links.get(event.link)
        if link is not None and link.up:
            self._lose(link, event.error)

    def _received(self, event: Received) -> None:
        link = self._links.get(event.link)
        if link is None or not link.up:
            self.counters["stale_messages"] += 1
            return
        link.liveness.sign(self._now)
        message = event.message
        if isinstance(message, Heartbeat):
            link.liveness.received(message, self._now)
            link.load = message.load
            self._told_load(link)
        elif isinstance(message, Bye):
            link.leaving = True
        else:
            self._told(link, message)

    def _timer(self, event: Timer) -> None:
        if event.load is not None:
            self._load = event.load
        for link in list(self._links.values()):
            if not link.up:
                continue
            verdict = link.liveness.verdict(self._now)
            if verdict is not None:
                self.counters["deaths"] += 1
                self._lose(link, PeerLost(f"{link.node.node_id}: {verdict}"))
            elif link.liveness.next_beat <= self._now:
                self._beat(link)
        self._expire()

    def _drain(self, event: Drain) -> None:
        if self.draining is None:
            self.draining = event.reason
            for link in self._links.values():
                if link.up:
                    self._send(link, Bye(event.reason))

    def _beat(self, link: L) -> None:
        load = Load(
            self._load.queue_age, self._load.waiting_tokens, self._load.free_pages, self._active_on(link)
        )
        self._send(link, link.liveness.beat(load, self._now))

    def _send(self, link: L, message: Message) -> None:
        if link.up:
            self._effects.append(Send(link.link, message))

    # ---------------------------------------------------------------- what a side adds

    def _make_link(self, event: LinkUp, liveness: Liveness) -> L:
        raise NotImplementedError

    def _lose(self, link: L, error: PdserveError) -> None:
        raise NotImplementedError

    def _told(self, link: L, message: Message) -> None:
        raise NotImplementedError

    def _told_load(self, link: L) -> None:
        """The peer's load has just been told."""

    def _expire(self) -> None:
        """Act on what is overdue."""

    def _own_deadline(self) -> float | None:
        """The side's own next deadline, in own time."""
        return None

    def _active_on(self, link: L) -> int:
        raise NotImplementedError


LINK_HANDLERS: dict[type[Event], str] = {
    LinkUp: "_link_up",
    LinkLost: "_link_lost",
    Received: "_received",
    Timer: "_timer",
    Drain: "_drain",
}
