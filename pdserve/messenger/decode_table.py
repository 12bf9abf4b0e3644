"""The decode side's transition table: what happens to a fetch, by its state. The essay is in `decode.py`."""

from __future__ import annotations

from enum import Enum

from pdserve.messenger.machine import Rule


class State(Enum):
    NEW = "new"
    """Submitted, in this very call."""
    ASKED = "asked"
    """`Prefill` is sent; no answer yet. Owns pages and armed slots."""
    RECEIVING = "receiving"
    """Accepted. Owns pages and armed slots."""
    LANDING = "landing"
    """The peer is quiet and has posted every run; not all are counted. Owns pages and armed slots."""
    CANCELLING = "cancelling"
    """Ended for its user; the peer is asked to be quiet. Owns quarantined pages and slots."""
    SETTLING = "settling"
    """Ended, and the peer is quiet; not all it posted is counted. Owns quarantined pages and slots."""
    FENCING = "fencing"
    """Ended; the port its writes come through is being closed. Owns quarantined pages and slots."""
    READY = "ready"
    """Final: all runs counted; the pages are the request's."""
    SAFE = "safe"
    """Final: nobody can write to the pages any more; they are the allocator's."""


class Happening(Enum):
    SUBMITTED = "submitted"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    QUIET = "quiet"
    FAILED = "failed"
    COUNTED = "counted"
    """A slot's count has risen, to no more than is expected."""
    OVERSHOT = "overshot"
    """A slot has counted more than is expected."""
    CANCELLED = "cancelled"
    """By the user."""
    EXPIRED = "expired"
    """The user's deadline has passed."""
    OVERDUE = "overdue"
    """This state's own time-out has passed."""
    LINK_LOST = "link lost"
    FENCED = "fenced"


LIVE = frozenset({State.ASKED, State.RECEIVING, State.LANDING})
"""The user still waits."""
FINAL = frozenset({State.READY, State.SAFE})

_S, _H = State, Happening

TRANSITIONS: dict[tuple[State, Happening], Rule[State]] = {
    (_S.NEW, _H.SUBMITTED): Rule("_ask", (_S.ASKED, _S.SAFE)),
    #
    (_S.ASKED, _H.ACCEPTED): Rule("_note_accepted", (_S.RECEIVING,)),
    (_S.ASKED, _H.REJECTED): Rule("_ask_another", (_S.ASKED, _S.SAFE, _S.FENCING)),
    (_S.ASKED, _H.COUNTED): Rule("_check_ready", (_S.ASKED, _S.READY)),
    (_S.ASKED, _H.CANCELLED): Rule("_cancel", (_S.CANCELLING,)),
    (_S.ASKED, _H.EXPIRED): Rule("_cancel_expired", (_S.CANCELLING,)),
    #
    (_S.RECEIVING, _H.QUIET): Rule("_hear_quiet", (_S.LANDING, _S.SETTLING, _S.SAFE, _S.FENCING)),
    (_S.RECEIVING, _H.FAILED): Rule("_hear_failed", (_S.SETTLING, _S.SAFE, _S.FENCING)),
    (_S.RECEIVING, _H.COUNTED): Rule("_check_ready", (_S.RECEIVING, _S.READY)),
    (_S.RECEIVING, _H.CANCELLED): Rule("_cancel", (_S.CANCELLING,)),
    (_S.RECEIVING, _H.EXPIRED): Rule("_cancel_expired", (_S.CANCELLING,)),
    #
    (_S.LANDING, _H.COUNTED): Rule("_check_ready", (_S.LANDING, _S.READY)),
    (_S.LANDING, _H.CANCELLED): Rule("_cancel_landing", (_S.SETTLING,)),
    (_S.LANDING, _H.EXPIRED): Rule("_expire_landing", (_S.SETTLING,)),
    #
    (_S.CANCELLING, _H.ACCEPTED): Rule("_note_accepted", (_S.CANCELLING,)),
    (_S.CANCELLING, _H.REJECTED): Rule("_hear_rejected", (_S.SAFE, _S.FENCING)),
    (_S.CANCELLING, _H.QUIET): Rule("_settle", (_S.SETTLING, _S.SAFE, _S.FENCING)),
    (_S.CANCELLING, _H.FAILED): Rule("_settle", (_S.SETTLING, _S.SAFE, _S.FENCING)),
    (_S.CANCELLING, _H.COUNTED): Rule("_check_complete", (_S.CANCELLING, _S.SAFE)),
    #
    (_S.SETTLING, _H.COUNTED): Rule("_check_settled", (_S.SETTLING, _S.SAFE, _S.FENCING)),
    #
    (_S.FENCING, _H.FENCED): Rule("_make_safe", (_S.SAFE,)),
}


def _complete() -> None:
    """Fill in what follows one pattern for all states, so that every pair is in the table."""
    waiting = [_S.LANDING, _S.CANCELLING, _S.SETTLING]
    for state in (_S.ASKED, _S.RECEIVING, *waiting):
        table: dict[Happening, Rule[State]] = {
            # A message the peer may not send now, or a write too many: fence it.
            **dict.fromkeys((_H.ACCEPTED, _H.REJECTED, _H.QUIET, _H.FAILED), Rule("_breach", (_S.FENCING,))),
            _H.OVERSHOT: Rule("_breach", (_S.FENCING,)),
            _H.LINK_LOST: Rule("_end_lost", (_S.FENCING,)),
            _H.CANCELLED: Rule("_ignore", (state,)),
        }
        if state in waiting:
            table[_H.OVERDUE] = Rule("_lose_patience", (_S.FENCING,))
        for happening, rule in table.items():
            TRANSITIONS.setdefault((state, happening), rule)
    for happening in (_H.COUNTED, _H.OVERSHOT, _H.CANCELLED):
        TRANSITIONS[_S.FENCING, happening] = Rule("_ignore", (_S.FENCING,))
    for state in State:
        for happening in Happening:
            TRANSITIONS.setdefault((state, happening), Rule("_impossible", ()))


_complete()
