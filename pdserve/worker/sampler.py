"""From raw logits to a token, one row at a time, so that a row's result never depends on the batch.

Order of operations, as in vLLM: log-probabilities are taken from the raw logits; then stop ids are masked
while fewer than `min_tokens` tokens are out; logit bias; repetition penalty (prompt and output), frequency
and presence penalties (output only); then greedy, or temperature, min-p, top-k, top-p, and a draw.

The draw inverts the cumulative distribution, in order of token id, at one uniform number. That number comes
from the counter-based generator Philox4x64 (Salmon et al. 2011, doi:10.1145/2063384.2063405) with key (seed,
choice) and counter position, where position is the index the new token gets in its sequence, prompt included.
So a sequence that is preempted, moved or batched otherwise draws the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.plan import SequenceOutput
from pdserve.engine.sampling import SamplingParams
from pdserve.errors import WorkerError

_GREEDY_BELOW = 1e-5
_WORD = 2**64 - 1


class TokenCounts:
    """How often each token occurs in prompt and output: what penalties need. One a sequence, [vocab] each."""

    def __init__(self, vocab_size: int) -> None:
        self.output = np.zeros(vocab_size, np.int32)
        self.seen = np.zeros(vocab_size, np.bool_)
        self._counted = 0

    def advance(self, tokens: NDArray[np.int64], prompt_len: int) -> None:
        """Count `tokens` beyond those already counted; a shorter list starts again."""
        if len(tokens) < self._counted:
            self.output[:] = 0
            self.seen[:] = False
            self._counted = 0
        self.seen[tokens[self._counted :]] = True
        np.add.at(self.output, tokens[max(self._counted, prompt_len) :], 1)
        self._counted = len(tokens)


class Sampler:
    """Samples sequences by their parameters; keeps the counts of those that have penalties."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[int, TokenCounts] = {}

    def forget(self, seq: int) -> None:
        """Drop what is kept of a sequence."""
        self._counts.pop(seq, None)

    def sample(
        self,
        seq: int,
        logits: NDArray[np.float32],
        params: SamplingParams,
        tokens: NDArray[np.int64],
        prompt_len: int,
    ) -> SequenceOutput:
        """The token after `tokens`. `logits`: raw, [vocab], left as they are."""
        adjusted = self._adjust(seq, logits, params, tokens, prompt_len)
        if params.temperature < _GREEDY_BELOW:
            token = int(adjusted.argmax())
        else:
            token = _draw(adjusted, params, uniform(params.seed or 0, params.choice, len(tokens)))
        # Of the raw ones: what a client's parameters make of them must not look like a broken model.
        if not np.isfinite(logits[token]):
            raise WorkerError(f"sequence {seq}: the model's output is not finite at position {len(tokens)}")
        if params.logprobs is None:
            return SequenceOutput(seq=seq, token=token)
        return _with_logprobs(seq, token, logits, params.logprobs)

    def _adjust(
        self,
        seq: int,
        logits: NDArray[np.float32],
        params: SamplingParams,
        tokens: NDArray[np.int64],
        prompt_len: int,
    ) -> NDArray[np.float32]:
        short = len(tokens) - prompt_len < params.min_tokens and bool(params.stop_token_ids)
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        if not (short or penalised or params.logit_bias):
            return logits
        adjusted = logits.copy()
        if short:
            adjusted[[token for token in params.stop_token_ids if token < self._vocab_size]] = -np.inf
        for token, bias in params.logit_bias.items():
            if 0 <= token < self._vocab_size:
                adjusted[token] += np.float32(bias)
        if penalised:
            counts = self._counts.setdefault(seq, TokenCounts(self._vocab_size))
            counts.advance(tokens, prompt_len)
            _penalise(adjusted, counts, params)
        return adjusted


def uniform(seed: int, choice: int, position: int) -> float:
    """The uniform number in [0, 1) of that key: 53 bits of Philox4x64's first word."""
    generator: Any = np.random.Philox(
        key=np.array([seed & _WORD, choice & _WORD], np.uint64),
        counter=np.array([position, 0, 0, 0], np.uint64),
    )
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def _penalise(logits: NDArray[np.float32], counts: TokenCounts, params: SamplingParams) -> None:
    if params.repetition_penalty != 1.0:
        seen = np.flatnonzero(counts.seen)
        values = logits[seen]
        factor = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    written = np.flatnonzero(counts.output)
    logits[written] -= np.float32(params.frequency_penalty) * counts.output[written]
    logits[written] -= np.float32(params.presence_penalty)


def _draw(logits: NDArray[np.float32], params: SamplingParams, point: float) -> int:
    scaled = logits / np.float32(params.temperature)
    top = scaled.max()
    if not np.isfinite(top):
        return int(scaled.argmax())
    lowest = np.float32(-np.inf)
    if params.min_p > 0:
        lowest = top + np.float32(np.log(params.min_p))
    if 0 < params.top_k < len(scaled):
        lowest = max(lowest, np.partition(scaled, -params.top_k)[-params.top_k])
    kept = np.flatnonzero(scaled >= lowest)
    weights = np.exp((scaled[kept] - top).astype(np.float64))
    if params.top_p < 1:
        nucleus = _nucleus(weights, params.top_p)
        kept, weights = kept[nucleus], weights[nucleus]
    cumulative = weights.cumsum()
    index = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
    return int(kept[min(index, len(kept) - 1)])


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Ascending indices of the fewest, largest weights that hold `top_p` of the sum; ties by index."""
    total = weights.sum()
    # What is lighter than this can't add up to the tail that is cut off, so it need not be sorted.
    heavy = np.flatnonzero(weights >= (1 - top_p) * total / len(weights) * (1 - 1e-9))
    order = heavy[np.argsort(-weights[heavy], kind="stable")]
    reached = int(np.searchsorted(weights[order].cumsum(), top_p * total, side="left"))
    nucleus: NDArray[np.intp] = np.sort(order[: reached + 1])
    return nucleus


def _with_logprobs(seq: int, token: int, logits: NDArray[np.float32], count: int) -> SequenceOutput:
    peak = logits.max()
    normaliser = float(peak) + float(np.log(np.exp((logits - peak).astype(np.float64)).sum()))
    top: list[tuple[int, float]] = []
    count = min(count, len(logits))
    if count:
        candidates = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
        best = candidates[np.argsort(-logits[candidates], kind="stable")][:count]
        top = [(int(i), float(logits[i]) - normaliser) for i in best]
    return SequenceOutput(seq=seq, token=token, logprob=float(logits[token]) - normaliser, top=top)
