"""What the HTTP edge needs from a node, and nothing more.

`http/` parses, validates, templates, tokenises, detokenises and frames; whoever implements `Frontend` (the
node, or a scripted fake in tests) turns prompt token ids into output token ids. All methods are called on the
one event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from pdserve.engine.sampling import SamplingParams


class DefaultSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Values for sampling fields a request leaves out (a model's generation_config.json may set them)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model as clients see it.

    `names`: every name a request may use; the first is the one reported. `max_model_len`: the most tokens a
    prompt and its output may have together, the smaller of the model's limit and what this node can hold.
    `vocab_size`: rows of the embedding; larger ids are refused. `eos_token_ids`: end a sequence unless
    `ignore_eos`. `created`: unix seconds. `role`: "prefill", "decode" or "both"; a prefill node generates
    nothing.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int
    role: str = "both"
    root: str = ""
    defaults: DefaultSampling = DefaultSampling()


class TokenOutput(msgspec.Struct, frozen=True):
    """One sampled token.

    `finish_reason` is None but on the last one: "stop" (the token is one of `SamplingParams.stop_token_ids`;
    it counts in usage and is not shown) or "length". `logprob` and `top` ([(token, logprob)], best first)
    only where `SamplingParams.logprobs` asked for them.
    """

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    finish_reason: str | None = None


class Generation(Protocol):
    """One running sequence, owned by the handler that asked for it.

    Iterating yields `TokenOutput`s until one has a finish reason, or raises a `PdserveError`. Iterated once,
    by one task. What it buffers for a reader that is slow is bounded by `max_tokens`.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in a prefix cache; final once the first token is out."""
        ...

    def __aiter__(self) -> AsyncIterator[TokenOutput]: ...

    async def aclose(self, reason: str = "abort") -> None:
        """End it on every node and give back what it owns. Idempotent; a no-op after the last token.

        `reason` "stop": a stop string ended it, which is a success; "abort": the client went away or
        something failed. Called always, also while the handler is being cancelled, so it must be short:
        it starts the clean-up and does not wait for peers.
        """
        ...


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`ready`: takes requests now (GET /health). `live`: makes progress, need not be restarted (GET /live).

    `reason`: one line when either is false. `detail`: small JSON-able facts, shown in both answers.
    """

    ready: bool
    live: bool
    reason: str = ""
    detail: Mapping[str, Any] = msgspec.field(default_factory=dict)


class Frontend(Protocol):
    """The node behind the routes."""

    @property
    def card(self) -> ServedModel: ...

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        max_tokens: int,
        *,
        priority: int = 0,
        trace_parent: str | None = None,
        arrival: float | None = None,
    ) -> Generation:
        """Admit one sequence to the bounded queue.

        `request_id` is unique among the running ones and is the key of its trace. Checked already: ids are
        within the vocabulary, 1 <= len(prompt_ids), max_tokens >= 1 and the sum fits `card.max_model_len`;
        left to the node: what peers can hold, and whether there is room. `arrival`: time.monotonic() when
        the request's head had been read. `trace_parent`: the W3C traceparent header as it came.

        Raises `ContextLengthExceeded`, `Overloaded`, `NoPeer`, `Draining` or another `PdserveError` before
        any work; cancelled, it leaves nothing behind.
        """
        ...

    def health(self) -> Health: ...

    def metrics(self) -> bytes:
        """The Prometheus text exposition of this node (observe.metrics.NodeMetrics.render)."""
        ...

    async def trace(self, request_id: str) -> dict[str, Any] | None:
        """The merged trace of a request (observe.trace), None when it is unknown or forgotten."""
        ...
