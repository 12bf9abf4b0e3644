"""The scheduler's gauges and counters at one moment."""

from __future__ import annotations

import dataclasses

import msgspec

from pdserve.engine.events import FinishReason


@dataclasses.dataclass(slots=True)
class Counters:
    """What the scheduler counts as it goes; `Statistics` publishes it. A request ends in exactly one way."""

    submitted: int = 0
    rejected: int = 0
    stop: int = 0
    length: int = 0
    computed: int = 0
    receive_failed: int = 0
    cancelled: int = 0
    expired: int = 0
    prompt_tokens: int = 0
    decode_tokens: int = 0

    def finished(self, reason: FinishReason) -> None:
        if reason == "stop":
            self.stop += 1
        else:
            self.length += 1


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges first, monotone counters (`*_total`) after. Pages are counted without the scrap page.

    All gauges but `pages_free` are zero on an idle node that has told its worker everything.
    """

    waiting: int
    waiting_tokens: int
    """Prompt tokens of the waiting requests."""
    unplanned_tokens: int
    """Prompt tokens of the running requests that are in no published step yet."""
    receiving: int
    ready: int
    running: int
    """Rows of the batch that are taken."""
    sending: int
    quarantined: int
    untold: int
    """Ended sequences that the worker has not been told to forget."""
    steps_in_flight: int
    pages_free: int
    pages_held: int
    pages_destination: int
    pages_quarantined: int
    pages_pending: int
    """Released, but named by a published step that has not ended."""
    pages_reserved: int
    """Free pages promised to admitted requests (part of `pages_free`)."""
    head_arrival: float | None
    """When the request at the head of the queue arrived; None: the queue is empty."""
    submitted_total: int
    rejected_total: int
    """Refused with `Overloaded`; not among the submitted."""
    finished_stop_total: int
    finished_length_total: int
    computed_total: int
    """Prefill-only requests whose last step has ended."""
    receive_failed_total: int
    cancelled_total: int
    expired_total: int
    """On an idle node the six ends above add up to `submitted_total`."""
    steps_total: int
    """Published steps."""
    prompt_tokens_total: int
    decode_tokens_total: int
