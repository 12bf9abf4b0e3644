"""What the scheduler tells the node: the step to run, and what became of requests."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from pdserve.engine.plan import Plan

FinishReason: TypeAlias = Literal["stop", "length"]


class Chunk(msgspec.Struct, frozen=True):
    """A part of a prefill-only prompt that this step computes.

    `first_page`: index in the request's page table of the first page that is complete after this step;
    `pages`: the ids of those pages, in order, never empty. With `last` the final page may be partly filled.
    """

    id: str
    first_page: int
    pages: list[int]
    last: bool


class Scheduled(msgspec.Struct, frozen=True):
    """The next step: `plan` for the workers, `chunks` for the messenger (which must hear of them first).

    `chunks` holds prefill-only requests alone; `plan.send` is set exactly when there are any.
    `prompt_tokens` and `decode_tokens`: the step's tokens, by what they are.
    """

    plan: Plan
    chunks: list[Chunk]
    prompt_tokens: int
    decode_tokens: int


class TokenEvent(msgspec.Struct, frozen=True):
    """A token was sampled. With a `finish_reason` it is the request's last: the request is gone.

    "stop": the token is one of `stop_token_ids` (it is reported like any other; whether to show it is the
    caller's business). "length": `max_tokens` are out.
    """

    id: str
    token: int
    logprob: float | None
    top: list[tuple[int, float]] | None
    finish_reason: FinishReason | None


class PrefillComputed(msgspec.Struct, frozen=True):
    """The step with the last chunk of a prefill-only request has ended. Its pages stay until `release`."""

    id: str


class Expired(msgspec.Struct, frozen=True):
    """The deadline of a waiting request has passed; it is gone. `waited` in seconds."""

    id: str
    waited: float


Event: TypeAlias = TokenEvent | PrefillComputed | Expired
