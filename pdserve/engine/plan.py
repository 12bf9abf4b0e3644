"""What a step is: the plan a node sends its workers, and the result that comes back.

A plan is a change to the worker's persistent batch, not a snapshot: new sequences, pages that sequences have
gained, sequences that ended, and the work of this step. Both directions are msgpack arrays (`array_like`), so
a field may only ever be appended.
"""

from __future__ import annotations

import msgspec

from pdserve.engine.sampling import SamplingParams


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence the worker has not seen before.

    `tokens`: everything known so far (the prompt, and after preemption the output too). `prompt_len`: how
    many of them are the client's prompt (penalties need the boundary). `pages`: its page table so far. KV of
    tokens before the first `Work.start` is already in those pages.
    """

    seq: int
    tokens: list[int]
    prompt_len: int
    pages: list[int]
    sampling: SamplingParams | None
    """None: this sequence is only prefilled, never sampled."""


class MorePages(msgspec.Struct, frozen=True, array_like=True):
    """Pages appended to a sequence's page table."""

    seq: int
    pages: list[int]


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Compute KV for positions [start, start + count) of one sequence; `sample` a token after the last one.

    A position at or past the tokens the worker knows is the token it sampled in the step before: with
    overlapped steps the node plans a decode step before it knows that token.
    """

    seq: int
    start: int
    count: int
    sample: bool


class Plan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """One step. Steps are numbered from 0 without gaps and run in order.

    `send`: a peer waits for this step's layers, so the worker pokes the tick eventfd after each tick.
    `finished`: sequences to forget before this step's work. An empty `work` is a legal plan (it only forgets)
    and still makes all its ticks.
    """

    step: int
    new: list[NewSequence]
    pages: list[MorePages]
    finished: list[int]
    work: list[Work]
    send: bool = False


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True):
    """A sampled token. `logprob` and `top` only where asked for; `top` is [(token, logprob)], best first."""

    seq: int
    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """What a step produced, in the order of the plan's work with `sample`. Times are CLOCK_MONOTONIC ns."""

    step: int
    outputs: list[SequenceOutput]
    started_ns: int
    ended_ns: int
