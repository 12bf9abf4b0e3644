"""The decode side's machine: from "these pages want the KV of this prompt" to "it is all there", or not.

Life of a fetch. It is *asked* of the least loaded peer, with its imm slots armed beforehand, and
*receiving* once accepted. It is ready the moment its slots have counted every run, whatever messages are
still under way: then nobody can write to it any more, and the machine forgets it. All else is about ends
that are not that one.

A fetch ends for its user at once (the client left, the peer failed it, its link was lost), but its pages
and slots do not: a peer that has not said otherwise may still write. So they stay quarantined through
*cancelling* (we asked for quiet), *settling* (quiet, but not all that was posted has been counted) and
*fencing* (we asked for no word and close the port), until one of the three proofs is in: counted all,
counted what was posted, or fenced. No time-out is a proof; a time-out only closes a port.

Where a fetch is: every state from ASKED to FENCING keeps it in `_fetches` and in its link's `fetches`;
READY and SAFE are nowhere. What it owns: its destination pages, and its slots (armed while the user waits,
quarantined after). READY gives the pages to the request, SAFE to the allocator; both retire the slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, ClassVar

from pdserve.errors import Draining, Overloaded, PdserveError, PeerError, PeerLost, ProtocolError
from pdserve.messenger.choice import choose, failure, too_late
from pdserve.messenger.decode_table import FINAL, LIVE, TRANSITIONS, Happening, State
from pdserve.messenger.events import (
    ArmSlot,
    CancelRequest,
    DisarmSlot,
    Event,
    Failed,
    Fence,
    Fenced,
    LinkUp,
    PagesSafe,
    Ready,
    Rehello,
    SlotCounted,
    SlotOvershoot,
    SlotProgress,
    Submit,
)
from pdserve.messenger.fetch import DecodeConfig, DecodeLink, Fetch
from pdserve.messenger.liveness import Liveness
from pdserve.messenger.machine import LINK_HANDLERS, Machine
from pdserve.messenger.messages import Accepted, Cancel, Message, Prefill, Quiet, Rejected
from pdserve.messenger.messages import Failed as FailedMessage
from pdserve.messenger.runs import TransferPlan, segment_pages
from pdserve.messenger.slots import SlotPool

__all__ = ["DecodeConfig", "DecodeMachine"]


class DecodeMachine(Machine[DecodeLink]):
    """`Submit` -> `Ready`, or `Failed` and `PagesSafe`, or (cancelled) `PagesSafe`.

    Sole owner of the imm slots of this process. Invariants: `check()`. Gauges: `statistics()`.
    """

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config.heartbeat_s, config.dead_s, config.pause_s, config.story)
        self.config = config
        self._slots = SlotPool(config.slots)
        self._fetches: dict[str, Fetch] = {}
        self._of_slot: dict[int, tuple[Fetch, int]] = {}
        self._due: list[tuple[float, int, Fetch]] = []
        self._order = 0
        self._attempts = 0
        """Attempts so far, of all requests: a prefill node may still be at an earlier one of a request that
        is over here, and its last word on that must not be taken for one on a new request of the same id."""
        self._geometries = [config.node.geometry(group) for group in range(len(config.node.groups))]
        self._segment_pages = config.node.segment_tokens // config.node.page_size

    @property
    def idle(self) -> bool:
        """No request, no quarantined page, no held slot."""
        return not self._fetches

    # ---------------------------------------------------------------- events

    def _submit(self, event: Submit) -> None:
        geometry = self._geometries[event.group]
        pages = geometry.pages_for(len(event.tokens) - 1)
        if len(event.tokens) < 2 or len(event.pages) != pages:
            raise ValueError(f"{len(event.tokens)} tokens with {len(event.pages)} pages: {pages} are needed")
        if event.request in self._fetches:
            raise ValueError(f"request {event.request} was submitted before and has not ended")
        expires = None if event.deadline_s is None else self._now + event.deadline_s
        fetch = self._fetches[event.request] = Fetch(event, expires)
        self._apply(fetch, Happening.SUBMITTED)
        if expires is not None and fetch.state in LIVE:
            self._schedule(expires, fetch)

    def _cancel_request(self, event: CancelRequest) -> None:
        fetch = self._fetches.get(event.request)
        if fetch is not None:
            self._apply(fetch, Happening.CANCELLED)

    def _told(self, link: DecodeLink, message: Message) -> None:
        happening = HAPPENING_OF.get(type(message))
        if happening is None:
            self._break_off(link, ProtocolError(f"{link.node.node_id} sent a {type(message).__name__}"))
            return
        assert isinstance(message, Accepted | Rejected | Quiet | FailedMessage)
        fetch = link.fetches.get(message.request)
        if fetch is None or fetch.attempt != message.attempt:
            self.counters["stale_messages"] += 1
        else:
            self._apply(fetch, happening, message)

    def _told_load(self, link: DecodeLink) -> None:
        link.asked_tokens = 0

    def _slot_counted(self, event: SlotCounted) -> None:
        self._count(event.slot, event.generation, None)

    def _slot_progress(self, event: SlotProgress) -> None:
        self._count(event.slot, event.generation, event.count)

    def _slot_overshoot(self, event: SlotOvershoot) -> None:
        self._count(event.slot, event.generation, event.count)

    def _count(self, slot: int, generation: int, count: int | None) -> None:
        """`count` None: all that is expected."""
        fetch, segment = self._of_slot.get(slot, (None, 0))
        if fetch is None or fetch.slots[segment].generation != generation:
            self.counters["ignored_events"] += 1
            return
        assert fetch.link is not None
        fetch.link.liveness.sign(self._now)
        expected = fetch.expected[segment]
        fetch.counted[segment] = max(fetch.counted[segment], expected if count is None else count)
        over = fetch.counted[segment] > expected
        self._apply(fetch, Happening.OVERSHOT if over else Happening.COUNTED)

    def _fenced(self, event: Fenced) -> None:
        link = self._links.pop(event.link, None)
        if link is None:
            self.counters["ignored_events"] += 1
            return
        if link.up:
            self._give_up(link, PeerLost(f"{link.node.node_id}: its port was closed"))
        for fetch in list(link.fetches.values()):
            self._apply(fetch, Happening.FENCED)
        if not any(other.up and other.node.node_id == link.node.node_id for other in self._links.values()):
            self._effects.append(Rehello(link.node.node_id))

    def _expire(self) -> None:
        while self._due and self._due[0][0] <= self._now:
            due, _, fetch = heapq.heappop(self._due)
            if fetch.due == due:
                self._apply(fetch, Happening.OVERDUE)
            elif fetch.expires == due and fetch.state in LIVE:
                self._apply(fetch, Happening.EXPIRED)

    def _own_deadline(self) -> float | None:
        due = self._due
        while due and not self._pending(due[0][0], due[0][2]):
            heapq.heappop(due)
        return due[0][0] if due else None

    @staticmethod
    def _pending(due: float, fetch: Fetch) -> bool:
        return fetch.due == due or (fetch.expires == due and fetch.state in LIVE)

    # ---------------------------------------------------------------- links

    def _make_link(self, event: LinkUp, liveness: Liveness) -> DecodeLink:
        if event.link in self._links:
            raise ValueError(f"link {event.link:016x} is up already")
        link = DecodeLink(event, liveness)
        source = event.node.geometry(0)
        link.plans = {g: TransferPlan(source, geometry) for g, geometry in enumerate(self._geometries)}
        return link

    def _lose(self, link: DecodeLink, error: PdserveError) -> None:
        self._effects.append(Fence(link.link, str(error)))
        self._give_up(link, error)

    def _give_up(self, link: DecodeLink, error: PdserveError) -> None:
        link.up = False
        if not isinstance(error, PeerLost):
            error = PeerLost(f"{link.node.node_id}: {error}")
        for fetch in list(link.fetches.values()):
            self._apply(fetch, Happening.LINK_LOST, error)

    def _break_off(self, link: DecodeLink, error: ProtocolError) -> None:
        self.counters["breaches"] += 1
        self._lose(link, error)

    def _active_on(self, link: DecodeLink) -> int:
        return len(link.fetches)

    # ---------------------------------------------------------------- actions of the table

    def _apply(self, fetch: Fetch, happening: Happening, detail: Any = None) -> None:
        rule = TRANSITIONS[fetch.state, happening]
        before = fetch.state
        getattr(self, rule.action)(fetch, detail)
        if fetch.state not in rule.to:
            raise AssertionError(f"{before} with {happening} led to {fetch.state}, which is not in {rule.to}")

    def _ask(self, fetch: Fetch, _: Any) -> None:
        """Ask the best peer that has not been asked yet, or end with why there is none."""
        choice = self._choose(fetch)
        if isinstance(choice, PdserveError):
            self._end(fetch, choice)
            self._make_safe(fetch, None)
            return
        self._attempts += 1
        fetch.attempt = self._attempts
        fetch.tried.add(choice.node.node_id)
        self._arm(fetch, choice)
        submit = fetch.submit
        message = Prefill(
            request=submit.request,
            attempt=fetch.attempt,
            group=submit.group,
            epoch=self.config.node.groups[submit.group].epoch,
            tokens=submit.tokens,
            first_token=0,
            pages=submit.pages,
            slots=[slot.imm_base for slot in fetch.slots],
            salt=submit.salt,
            priority=submit.priority,
            remaining=None if fetch.expires is None else max(0.0, fetch.expires - self._now),
            trace=submit.trace,
        )
        self._send(choice, message)
        fetch.state = State.ASKED

    def _choose(self, fetch: Fetch) -> DecodeLink | PdserveError:
        """The link to ask now, or why there is none."""
        retry_after = self.config.retry_after_s
        if self.draining is not None and not fetch.attempt:
            return Draining("this node is shutting down", retry_after=retry_after)
        choice = choose(fetch, self._links.values(), retry_after)
        if isinstance(choice, PdserveError):
            return choice
        if self._slots.free < -(-len(fetch.submit.pages) // self._segment_pages):
            return Overloaded(f"all {self.config.slots} imm slots are in use", retry_after=retry_after)
        self._order += 1
        choice.turn = self._order
        choice.asked_tokens += len(fetch.submit.tokens)
        return choice

    def _arm(self, fetch: Fetch, link: DecodeLink) -> None:
        """Expect the request's runs from this link. Its slots are armed before it can hear of them."""
        per_page = link.plans[fetch.submit.group].runs_per_page
        pages = segment_pages(len(fetch.submit.pages), self._segment_pages)
        fetch.link = link
        link.fetches[fetch.request] = fetch
        fetch.slots = self._slots.take(len(pages))
        fetch.expected = [count * per_page for count in pages]
        fetch.counted = [0] * len(pages)
        fetch.posted = None
        for segment, slot in enumerate(fetch.slots):
            self._of_slot[slot.index] = (fetch, segment)
            self._effects.append(ArmSlot(slot.index, slot.generation, fetch.expected[segment]))

    def _disarm(self, fetch: Fetch) -> None:
        """The slots' generations are over: nobody can write to them any more."""
        for slot in fetch.slots:
            del self._of_slot[slot.index]
            self._slots.retire(slot)
            self._effects.append(DisarmSlot(slot.index, slot.generation))
        fetch.slots = []
        if fetch.link is not None:
            del fetch.link.fetches[fetch.request]
            fetch.link = None

    def _end(self, fetch: Fetch, error: PdserveError | None) -> None:
        """It ends for its user (None: by the user's own wish); its pages and slots are in quarantine."""
        fetch.ended = True
        for slot in fetch.slots:
            self._slots.quarantine(slot)
        if error is not None:
            self._effects.append(Failed(fetch.request, error))

    def _note_accepted(self, fetch: Fetch, _: Any) -> None:
        if fetch.state is State.ASKED:
            fetch.state = State.RECEIVING

    def _ask_another(self, fetch: Fetch, message: Rejected) -> None:
        """Rejected is as good as quiet: nothing was posted, so the same pages go to the next peer."""
        if any(fetch.counted):
            self._breach(fetch, message)
            return
        fetch.rejections.append(message)
        self._disarm(fetch)
        self._ask(fetch, None)

    def _hear_rejected(self, fetch: Fetch, message: Rejected) -> None:
        if any(fetch.counted):
            self._breach(fetch, message)
        else:
            self._make_safe(fetch, None)

    def _check_ready(self, fetch: Fetch, _: Any) -> None:
        if not fetch.missing():
            self._disarm(fetch)
            del self._fetches[fetch.request]
            fetch.due = None
            fetch.state = State.READY
            self._effects.append(Ready(fetch.request))

    def _cancel(self, fetch: Fetch, _: Any) -> None:
        assert fetch.link is not None
        self._end(fetch, None)
        self._send(fetch.link, Cancel(fetch.request, fetch.attempt))
        self._wait(fetch, State.CANCELLING, self.config.cancel_s)

    def _cancel_expired(self, fetch: Fetch, _: Any) -> None:
        assert fetch.link is not None
        self._end(fetch, too_late(fetch))
        self._send(fetch.link, Cancel(fetch.request, fetch.attempt))
        self._wait(fetch, State.CANCELLING, self.config.cancel_s)

    def _cancel_landing(self, fetch: Fetch, _: Any) -> None:
        """The peer is quiet already: keep waiting for what it posted, for nobody."""
        self._end(fetch, None)
        fetch.state = State.SETTLING

    def _expire_landing(self, fetch: Fetch, _: Any) -> None:
        self._end(fetch, too_late(fetch))
        fetch.state = State.SETTLING

    def _hear_quiet(self, fetch: Fetch, message: Quiet) -> None:
        if not self._plausible(fetch, message.posted):
            self._breach(fetch, message)
        elif message.posted == fetch.expected:
            fetch.posted = message.posted
            self._wait(fetch, State.LANDING, self.config.settle_s)
        else:
            error = PeerError(f"the prefill node posted {sum(message.posted)} of {sum(fetch.expected)} runs")
            self._end(fetch, error)
            self._settle(fetch, message)

    def _hear_failed(self, fetch: Fetch, message: FailedMessage) -> None:
        self._end(fetch, failure(message))
        self._settle(fetch, message)

    def _settle(self, fetch: Fetch, message: Quiet | FailedMessage) -> None:
        """It has ended, and now the peer is quiet: wait until what it posted has been counted."""
        assert fetch.link is not None
        if message.posted is None:
            name = fetch.link.node.node_id
            self._lose(fetch.link, PeerLost(f"{name} can't say what it posted: {message.reason}"))
        elif not self._plausible(fetch, message.posted):
            self._breach(fetch, message)
        elif fetch.counted == message.posted:
            self._make_safe(fetch, None)
        else:
            fetch.posted = message.posted
            self._wait(fetch, State.SETTLING, self.config.settle_s)

    @staticmethod
    def _plausible(fetch: Fetch, posted: list[int]) -> bool:
        """Whether a peer can have posted that: no less than was counted, no more than expected."""
        return len(posted) == len(fetch.expected) and all(
            counted <= runs <= expected
            for counted, runs, expected in zip(fetch.counted, posted, fetch.expected, strict=True)
        )

    def _check_complete(self, fetch: Fetch, _: Any) -> None:
        """All expected runs have landed after all: the peer has nothing left that it could write."""
        if not fetch.missing():
            self._make_safe(fetch, None)

    def _check_settled(self, fetch: Fetch, _: Any) -> None:
        assert fetch.posted is not None
        if any(counted > runs for counted, runs in zip(fetch.counted, fetch.posted, strict=True)):
            self._breach(fetch, None)
        elif fetch.counted == fetch.posted:
            self._make_safe(fetch, None)

    def _make_safe(self, fetch: Fetch, _: Any) -> None:
        self._disarm(fetch)
        del self._fetches[fetch.request]
        fetch.due = None
        fetch.state = State.SAFE
        self._effects.append(PagesSafe(fetch.request))

    def _lose_patience(self, fetch: Fetch, _: Any) -> None:
        """A Cancel without an answer, or writes that were posted and never landed: fence the link."""
        assert fetch.link is not None
        waited = self.config.cancel_s if fetch.state is State.CANCELLING else self.config.settle_s
        name, what = fetch.link.node.node_id, fetch.state.value
        self._lose(fetch.link, PeerLost(f"{name}: request {fetch.request} {what} for {waited:.1f} s"))

    def _breach(self, fetch: Fetch, message: Message | None) -> None:
        """The peer did what the protocol does not allow: believe nothing it says, and fence it."""
        assert fetch.link is not None
        did = "more writes landed than may" if message is None else f"a {type(message).__name__} out of place"
        error = ProtocolError(
            f"{fetch.link.node.node_id}: request {fetch.request} ({fetch.state.value}): {did}"
        )
        self._break_off(fetch.link, error)

    def _end_lost(self, fetch: Fetch, error: PdserveError) -> None:
        if not fetch.ended:
            self._end(fetch, error)
        fetch.due = None
        fetch.state = State.FENCING

    def _ignore(self, fetch: Fetch, _: Any) -> None:
        """Changes nothing."""

    def _impossible(self, fetch: Fetch, _: Any) -> None:
        raise AssertionError(f"request {fetch.request} is {fetch.state}")

    def _wait(self, fetch: Fetch, state: State, seconds: float) -> None:
        fetch.state = state
        fetch.due = self._now + seconds
        self._schedule(fetch.due, fetch)

    def _schedule(self, due: float, fetch: Fetch) -> None:
        self._order += 1
        heapq.heappush(self._due, (due, self._order, fetch))

    # ---------------------------------------------------------------- looking in

    def statistics(self) -> dict[str, int | float]:
        """Gauges (all zero but `slots_free` and `links_up` when idle) and counters."""
        fetches = self._fetches.values()
        states = {f"requests_{state.value}": 0 for state in State if state not in FINAL}
        for fetch in fetches:
            states[f"requests_{fetch.state.value}"] += 1
        quarantined = [fetch for fetch in fetches if fetch.state not in LIVE]
        return {
            **states,
            **{f"slots_{name}": count for name, count in self._slots.statistics().items()},
            "pages_receiving": sum(len(f.submit.pages) for f in fetches) - _pages(quarantined),
            "pages_quarantined": _pages(quarantined),
            "runs_outstanding": sum(fetch.missing() for fetch in fetches),
            "links_up": sum(link.up for link in self._links.values()),
            "links_fencing": sum(not link.up for link in self._links.values()),
            "pauses": self._time.pauses,
            **self.counters,
        }

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold."""
        self._slots.check()
        held = [slot for fetch in self._fetches.values() for slot in fetch.slots]
        assert len({slot.index for slot in held}) == len(held), "two requests share a slot"
        assert {slot.index for slot in held} == set(self._of_slot), "slots without a request, or the reverse"
        assert self._slots.free + len(held) == self.config.slots, "slots leaked"
        pages = [(f.submit.group, page) for f in self._fetches.values() for page in f.submit.pages]
        assert len(set(pages)) == len(pages), "two requests share a destination page"
        for fetch in self._fetches.values():
            assert fetch.link is not None, f"{fetch.request} is {fetch.state} without a link"
            assert fetch.link.fetches[fetch.request] is fetch, f"{fetch.request} is not on its link"
            assert fetch.link.up != (fetch.state is State.FENCING), f"{fetch.request} is {fetch.state}"
        for link in self._links.values():
            for request, fetch in link.fetches.items():
                assert self._fetches.get(request) is fetch, f"{request} is on a link but has ended"

    _handlers: ClassVar[Mapping[type[Event], str]] = {
        **LINK_HANDLERS,
        Submit: "_submit",
        CancelRequest: "_cancel_request",
        SlotCounted: "_slot_counted",
        SlotProgress: "_slot_progress",
        SlotOvershoot: "_slot_overshoot",
        Fenced: "_fenced",
    }


HAPPENING_OF: dict[type[Any], Happening] = {
    Accepted: Happening.ACCEPTED,
    Rejected: Happening.REJECTED,
    Quiet: Happening.QUIET,
    FailedMessage: Happening.FAILED,
}


def _pages(fetches: list[Fetch]) -> int:
    return sum(len(fetch.submit.pages) for fetch in fetches)
