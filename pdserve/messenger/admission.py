"""What a prefill node checks in a `Prefill` before it takes it: every field that it will compute with."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from pdserve.messenger.facts import NodeFacts
from pdserve.messenger.imm import is_base
from pdserve.messenger.messages import Prefill


class Refusal(NamedTuple):
    """`code` and `reason` of the `Rejected` to send."""

    code: str
    reason: str


def refuse(
    prefill: Prefill,
    ours: NodeFacts,
    theirs: NodeFacts,
    own_pages: int,
    *,
    vocab_size: int,
    slots_in_use: Container[int],
) -> Refusal | None:
    """Why a `Prefill` of the node `theirs` can't be taken, naming field, value and limit; None if it can.

    `own_pages`: source pages that the computing group has. `slots_in_use`: imm bases of its live works.
    """
    return (
        _unsupported(prefill)
        or _wrong_place(prefill, theirs)
        or _wrong_length(prefill, ours, own_pages)
        or _wrong_tokens(prefill, vocab_size)
        or _wrong_pages(prefill, theirs)
        or _wrong_slots(prefill, theirs, slots_in_use)
    )


def target(prefill: Prefill) -> int:
    """How many tokens' KV is computed: the last one is the decode node's first step."""
    return len(prefill.tokens) - 1


def _unsupported(prefill: Prefill) -> Refusal | None:
    if prefill.handover != "token":
        return Refusal("unsupported", f"handover is {prefill.handover!r}; only 'token' is supported")
    if prefill.context_slot is not None:
        return Refusal("unsupported", "context_slot is set, but handover 'token' moves no context")
    if prefill.first_token:
        return Refusal("unsupported", f"first_token is {prefill.first_token}; only 0 is supported")
    if prefill.adapter or prefill.inputs:
        return Refusal("unsupported", "adapter and inputs are reserved")
    return None


def _wrong_place(prefill: Prefill, theirs: NodeFacts) -> Refusal | None:
    if prefill.group >= len(theirs.groups):
        return Refusal("bad_pages", f"group is {prefill.group}; the node has {len(theirs.groups)}")
    epoch = theirs.groups[prefill.group].epoch
    if prefill.epoch != epoch:
        return Refusal("epoch", f"arena epoch is {prefill.epoch}; hello said {epoch}")
    return None


def _wrong_length(prefill: Prefill, ours: NodeFacts, own_pages: int) -> Refusal | None:
    tokens = len(prefill.tokens)
    if tokens < 2:
        return Refusal("too_short", "a prompt of 1 token needs no prefill")
    if tokens > ours.max_model_len:
        return Refusal("too_long", f"the prompt has {tokens} tokens; this node takes {ours.max_model_len}")
    pages = -(-target(prefill) // ours.page_size)
    if pages > own_pages:
        return Refusal("too_long", f"the prompt takes {pages} pages; this node has {own_pages}")
    return None


def _wrong_tokens(prefill: Prefill, vocab_size: int) -> Refusal | None:
    largest = max(prefill.tokens)
    if largest >= vocab_size:
        return Refusal("bad_tokens", f"token id {largest} is not in 0..{vocab_size - 1}")
    return None


def _wrong_pages(prefill: Prefill, theirs: NodeFacts) -> Refusal | None:
    pages = prefill.pages
    needed = -(-target(prefill) // theirs.page_size)
    if len(pages) != needed:
        return Refusal("bad_pages", f"{len(pages)} pages for {target(prefill)} tokens; {needed} are needed")
    if len(set(pages)) != len(pages):
        return Refusal("bad_pages", "a page is in the page table twice")
    limit = theirs.groups[prefill.group].num_pages
    if min(pages) < 1 or max(pages) >= limit:
        return Refusal("bad_pages", f"page ids {min(pages)}..{max(pages)} are not all in 1..{limit - 1}")
    return None


def _wrong_slots(prefill: Prefill, theirs: NodeFacts, in_use: Container[int]) -> Refusal | None:
    slots = prefill.slots
    needed = -(-len(prefill.pages) * theirs.page_size // theirs.segment_tokens)
    if len(slots) != needed:
        return Refusal("bad_slots", f"{len(slots)} slots; the prompt has {needed} segments")
    if not all(is_base(slot) for slot in slots) or len({slot >> 20 for slot in slots}) != len(slots):
        return Refusal("bad_slots", "slots must be distinct, with their runs field zero")
    if any(slot in in_use for slot in slots):
        return Refusal("bad_slots", "a slot is in use by another request")
    return None
