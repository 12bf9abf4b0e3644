"""The prefill side's transition table: what happens to a work, by its state. The essay is in `prefill.py`."""

from __future__ import annotations

from enum import Enum

from pdserve.messenger.machine import Rule


class State(Enum):
    OFFERED = "offered"
    """Given to the scheduler, which has not answered. Owns nothing."""
    WITHDRAWN = "withdrawn"
    """Cancelled while offered. Owns nothing."""
    ORPHANED = "orphaned"
    """Its link was lost while offered. Owns nothing."""
    QUEUED = "queued"
    """The scheduler has it; no chunk planned yet. Owns source pages."""
    RUNNING = "running"
    """Some chunk is planned. Owns source pages and outstanding batches."""
    DRAINING = "draining"
    """Everything is posted. Owns source pages and outstanding batches."""
    CANCELLING = "cancelling"
    """Nothing more will be posted; `Quiet` (or `Failed`, counted) follows the last batch. Owns as before."""
    FAILING = "failing"
    """A write failed and the peer has been told; waiting for the other batches. Owns as before."""
    CLOSING = "closing"
    """Its link is lost; waiting for its batches or the endpoint's end. Owns as before."""
    REFUSED = "refused"
    """Final: never begun."""
    RELEASED = "released"
    """Final: source pages given back."""


class Happening(Enum):
    ENQUEUED = "enqueued"
    REFUSED = "refused"
    PLANNED = "planned"
    POSTED = "posted"
    """Its last chunk has posted its last layer."""
    BATCH_DONE = "batch done"
    BATCH_FAILED = "batch failed"
    CANCELLED = "cancelled"
    """By the peer."""
    COMPUTE_FAILED = "compute failed"
    LINK_LOST = "link lost"
    CLOSED = "closed"


FINAL = frozenset({State.REFUSED, State.RELEASED})

_S, _H = State, Happening
_END = (_S.CANCELLING, _S.RELEASED)

TRANSITIONS: dict[tuple[State, Happening], Rule[State]] = {
    (_S.OFFERED, _H.ENQUEUED): Rule("_accept", (_S.QUEUED,)),
    (_S.OFFERED, _H.REFUSED): Rule("_reject", (_S.REFUSED,)),
    (_S.OFFERED, _H.CANCELLED): Rule("_withdraw", (_S.WITHDRAWN,)),
    (_S.OFFERED, _H.LINK_LOST): Rule("_orphan", (_S.ORPHANED,)),
    #
    (_S.WITHDRAWN, _H.ENQUEUED): Rule("_cancel", (_S.RELEASED,)),
    (_S.WITHDRAWN, _H.REFUSED): Rule("_reject", (_S.REFUSED,)),
    (_S.WITHDRAWN, _H.CANCELLED): Rule("_ignore", (_S.WITHDRAWN,)),
    (_S.WITHDRAWN, _H.LINK_LOST): Rule("_orphan", (_S.ORPHANED,)),
    #
    (_S.ORPHANED, _H.ENQUEUED): Rule("_lose_work", (_S.RELEASED,)),
    (_S.ORPHANED, _H.REFUSED): Rule("_reject", (_S.REFUSED,)),
    (_S.ORPHANED, _H.CLOSED): Rule("_ignore", (_S.ORPHANED,)),
    #
    (_S.QUEUED, _H.PLANNED): Rule("_plan", (_S.RUNNING, _S.DRAINING)),
    (_S.QUEUED, _H.CANCELLED): Rule("_cancel", (_S.RELEASED,)),
    (_S.QUEUED, _H.COMPUTE_FAILED): Rule("_fail_compute", (_S.RELEASED,)),
    (_S.QUEUED, _H.LINK_LOST): Rule("_lose_work", (_S.RELEASED,)),
    #
    (_S.RUNNING, _H.PLANNED): Rule("_plan", (_S.RUNNING, _S.DRAINING)),
    (_S.RUNNING, _H.POSTED): Rule("_finish", (_S.DRAINING, _S.RELEASED)),
    (_S.RUNNING, _H.BATCH_DONE): Rule("_ignore", (_S.RUNNING,)),
    (_S.RUNNING, _H.BATCH_FAILED): Rule("_fail_write", (_S.FAILING, _S.RELEASED)),
    (_S.RUNNING, _H.CANCELLED): Rule("_cancel", _END),
    (_S.RUNNING, _H.COMPUTE_FAILED): Rule("_fail_compute", _END),
    (_S.RUNNING, _H.LINK_LOST): Rule("_lose_work", (_S.CLOSING, _S.RELEASED)),
    #
    (_S.DRAINING, _H.BATCH_DONE): Rule("_check_quiet", (_S.DRAINING, _S.RELEASED)),
    (_S.DRAINING, _H.BATCH_FAILED): Rule("_fail_write", (_S.FAILING, _S.RELEASED)),
    (_S.DRAINING, _H.CANCELLED): Rule("_ignore", (_S.DRAINING,)),
    (_S.DRAINING, _H.COMPUTE_FAILED): Rule("_ignore", (_S.DRAINING,)),
    (_S.DRAINING, _H.LINK_LOST): Rule("_lose_work", (_S.CLOSING,)),
    #
    (_S.CANCELLING, _H.PLANNED): Rule("_ignore", (_S.CANCELLING,)),
    (_S.CANCELLING, _H.BATCH_DONE): Rule("_check_quiet", (_S.CANCELLING, _S.RELEASED)),
    (_S.CANCELLING, _H.BATCH_FAILED): Rule("_fail_write", (_S.FAILING, _S.RELEASED)),
    (_S.CANCELLING, _H.CANCELLED): Rule("_ignore", (_S.CANCELLING,)),
    (_S.CANCELLING, _H.COMPUTE_FAILED): Rule("_ignore", (_S.CANCELLING,)),
    (_S.CANCELLING, _H.LINK_LOST): Rule("_lose_work", (_S.CLOSING,)),
    #
    (_S.FAILING, _H.PLANNED): Rule("_ignore", (_S.FAILING,)),
    (_S.FAILING, _H.BATCH_DONE): Rule("_check_released", (_S.FAILING, _S.RELEASED)),
    (_S.FAILING, _H.BATCH_FAILED): Rule("_check_released", (_S.FAILING, _S.RELEASED)),
    (_S.FAILING, _H.CANCELLED): Rule("_ignore", (_S.FAILING,)),
    (_S.FAILING, _H.COMPUTE_FAILED): Rule("_ignore", (_S.FAILING,)),
    (_S.FAILING, _H.LINK_LOST): Rule("_lose_work", (_S.CLOSING,)),
    #
    (_S.CLOSING, _H.PLANNED): Rule("_ignore", (_S.CLOSING,)),
    (_S.CLOSING, _H.BATCH_DONE): Rule("_check_released", (_S.CLOSING, _S.RELEASED)),
    (_S.CLOSING, _H.BATCH_FAILED): Rule("_check_released", (_S.CLOSING, _S.RELEASED)),
    (_S.CLOSING, _H.COMPUTE_FAILED): Rule("_ignore", (_S.CLOSING,)),
    (_S.CLOSING, _H.CLOSED): Rule("_release", (_S.RELEASED,)),
}
for _state in State:
    for _happening in Happening:
        TRANSITIONS.setdefault((_state, _happening), Rule("_impossible", ()))
