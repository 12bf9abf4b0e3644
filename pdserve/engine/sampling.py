"""Sampling parameters of one sequence, as the scheduler carries them and the worker applies them."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How one sequence is sampled. Ranges are checked at the HTTP edge, before this is built.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 are off. `seed` None means a seed drawn
    by the node at admission: by the time a `SamplingParams` reaches a worker it is always set. The random
    stream is keyed by (seed, choice, position), so it does not depend on the batch or on preemption.
    `logprobs` None: none wanted; k: the chosen token's and the k most likely ones' log-probabilities, taken
    from the model's distribution before temperature and filters (as vLLM does).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence (the model's EOS ids are among them unless `ignore_eos`)."""
