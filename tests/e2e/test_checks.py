"""The checks themselves, on numbers made up for them: what they raise on, and what they let pass."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pdserve.http.frontend import TokenOutput
from tests.e2e.exactness import (
    Different,
    check_greedy,
    check_outputs,
    check_runs,
    check_tokens_kv,
)

TAU = 0.01


def output(logits: NDArray[np.float32], token: int | None = None) -> TokenOutput:
    """What a node would answer to these logits [vocabulary], taking the best token unless told otherwise."""
    logprobs = logits - np.logaddexp.reduce(logits.astype(np.float64))
    best = [int(t) for t in np.argsort(-logprobs)[:5]]
    token = best[0] if token is None else token
    return TokenOutput(token, float(logprobs[token]), [(t, float(logprobs[t])) for t in best])


@pytest.fixture
def logits() -> NDArray[np.float32]:
    """[3, 20], the best two tokens well apart."""
    found = np.random.default_rng(5).normal(size=(3, 20)).astype(np.float32)
    found[:, 7] = found.max(axis=1) + 1
    return found


def test_greedy_tokens_of_the_reference_pass(logits: NDArray[np.float32]) -> None:
    agreement = check_greedy([output(row) for row in logits], logits, TAU)
    assert agreement.worst < 1e-6
    assert agreement.divergences == []


def test_a_near_tie_is_listed(logits: NDArray[np.float32]) -> None:
    logits[1, 4] = logits[1, 7] - np.float32(0.015)
    outputs = [output(row, 4 if index == 1 else None) for index, row in enumerate(logits)]
    (found,) = check_greedy(outputs, logits, TAU).divergences
    assert (found.index, found.token, found.reference) == (1, 4, 7)
    assert found.margin == pytest.approx(0.015, abs=1e-6)


@pytest.mark.parametrize("margin", [0.021, 0.5])
def test_another_token_is_no_near_tie(margin: float, logits: NDArray[np.float32]) -> None:
    logits[1, 4] = logits[1, 7] - np.float32(margin)
    with pytest.raises(Different, match="token 1: 4, not 7: no tie"):
        check_greedy([output(row, 4 if i == 1 else None) for i, row in enumerate(logits)], logits, TAU)


def test_log_probabilities_off_by_more_than_tau(logits: NDArray[np.float32]) -> None:
    outputs = [output(row) for row in logits]
    logits[2, 7] += 1
    with pytest.raises(Different, match="token 2: log-probability"):
        check_greedy(outputs, logits, TAU)


def test_every_token_needs_its_row(logits: NDArray[np.float32]) -> None:
    with pytest.raises(Different, match="2 rows of logits for 3 tokens"):
        check_greedy([output(row) for row in logits], logits[:2], TAU)


def test_outputs_are_compared_to_the_last_bit(logits: NDArray[np.float32]) -> None:
    outputs = [output(row) for row in logits]
    check_outputs(outputs, [output(row) for row in logits])
    last = outputs[2]
    assert last.logprob is not None
    nearly = msgspec.structs.replace(last, logprob=float(np.nextafter(last.logprob, 0.0)))
    for other in (nearly, msgspec.structs.replace(last, top=None)):
        with pytest.raises(Different, match="token 2"):
            check_outputs([*outputs[:2], other], outputs)
    with pytest.raises(Different, match="tokens"):
        check_outputs(outputs[:2], outputs)


def test_pages_are_compared_as_bits() -> None:
    pages = np.zeros((2, 3, 2, 2, 4, 2), np.uint32)
    check_runs(pages, pages.copy())
    negative_zero = pages.copy()
    negative_zero[1, 2, 1, 0, 3, 1] = 0x80000000
    with pytest.raises(Different, match=r"run of layer 1, page 2: 1 of 32 .* head 1, K, token 3, dim 1"):
        check_runs(pages, negative_zero)
    with pytest.raises(Different, match="the source has pages"):
        check_runs(pages, pages[:, :2])


def test_tokens_are_compared_and_padding_is_not() -> None:
    """Three pages of four tokens, of which ten are valid; the other node has one page more."""
    pages = np.random.default_rng(1).integers(0, 1 << 32, (2, 3, 2, 2, 4, 2), np.uint32)
    other = np.concatenate([pages, pages[:, :1]], axis=1)
    other[:, 2, :, :, 2:] += 1
    check_tokens_kv(pages, other, 10)
    with pytest.raises(Different, match="token 10 differs"):
        check_tokens_kv(pages, other, 11)
    with pytest.raises(Different, match="13 tokens"):
        check_tokens_kv(pages, other, 13)
