"""What "the same" means between nodes, as functions that raise `Different` where it does not hold.

Everything is compared as bits. The layout is written down here a second time, on purpose: the arithmetic of
`messenger.runs` is under test, so these functions do without it.

    arena   [layer][page][head][K|V][token][dim]        every run of a transfer between two nodes of one rank
    run      layer, page: all of head ... dim           each is a whole page of one layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.http.frontend import TokenOutput
from pdserve.node.node import Node

Pages = NDArray[np.uint32]
"""Bits of pages of one node in the order of a page table: [layer, page, head, K|V, token, dim]."""


class Different(AssertionError):
    """Two things that should be the same are not; the message says where."""


def read_pages(node: Node, pages: Sequence[int]) -> Pages:
    """A copy of these pages of a node's arena, in every layer."""
    return _arena(node)[:, list(pages)]


def write_pages(node: Node, pages: Sequence[int], content: Pages) -> None:
    """Overwrite pages of a node's arena, as a fault would."""
    _arena(node)[:, list(pages)] = content


def clear_arena(node: Node) -> None:
    """Zero the arena of a node that is idle."""
    _arena(node)[:] = 0


def _arena(node: Node) -> Pages:
    """A view that must not be kept: the arena cannot be closed while there is one."""
    ready = node.worker.ready
    shape = (ready.layers, ready.num_pages, ready.kv_heads, 2, ready.page_size, ready.head_dim)
    assert ready.dtype == "float32"
    return np.frombuffer(node.worker.arena.buffer, np.uint32).reshape(shape)


def check_runs(source: Pages, destination: Pages) -> None:
    """DESIGN 12.1: the bytes on the decode node equal the source's, whole pages, run by run."""
    if source.shape != destination.shape:
        raise Different(f"KV: the source has pages {source.shape}, the destination {destination.shape}")
    for layer in range(source.shape[0]):
        for page in range(source.shape[1]):
            if source[layer, page].tobytes() != destination[layer, page].tobytes():
                wrong = np.argwhere(source[layer, page] != destination[layer, page])
                head, half, token, dim = wrong[0]
                raise Different(
                    f"KV: run of layer {layer}, page {page}: {len(wrong)} of {source[layer, page].size} "
                    f"elements differ, the first at head {head}, {'KV'[half]}, token {token}, dim {dim}"
                )


def check_tokens_kv(pages: Pages, reference: Pages, tokens: int) -> None:
    """KV of the first `tokens` tokens equals that of another node, wherever either keeps it."""
    ours, theirs = _by_token(pages, tokens), _by_token(reference, tokens)
    if ours.shape != theirs.shape or ours.shape[0] != tokens:
        raise Different(f"KV: {tokens} tokens are in neither {ours.shape} nor {theirs.shape}")
    if not np.array_equal(ours, theirs):
        token, layer, head, half, dim = np.argwhere(ours != theirs)[0]
        raise Different(
            f"KV: token {token} differs, first in layer {layer}, head {head}, {'KV'[half]}, {dim}"
        )


def _by_token(pages: Pages, tokens: int) -> Pages:
    """[token, layer, head, K|V, dim]"""
    layers, count, heads, halves, size, dim = pages.shape
    flat = pages.transpose(1, 4, 0, 2, 3, 5).reshape(count * size, layers, heads, halves, dim)
    return flat[:tokens]


def check_outputs(ours: Sequence[TokenOutput], reference: Sequence[TokenOutput]) -> None:
    """The same tokens with the same log-probabilities, to the last bit."""
    if [output.token_id for output in ours] != [output.token_id for output in reference]:
        raise Different(f"tokens: {_ids(ours)}, but the reference has {_ids(reference)}")
    for index, (output, expected) in enumerate(zip(ours, reference, strict=True)):
        if output.logprob is None or output.top is None:
            raise Different(f"token {index}: no log-probabilities to compare")
        if output != expected:
            raise Different(f"token {index}: {output}, but the reference has {expected}")


def _ids(outputs: Sequence[TokenOutput]) -> list[int]:
    return [output.token_id for output in outputs]


@dataclass(frozen=True)
class Divergence:
    """A greedy token that the reference would not have taken, at a near-tie."""

    index: int
    token: int
    reference: int
    margin: float
    """By how much the reference prefers its own."""


def check_greedy(outputs: Sequence[TokenOutput], logits: NDArray[np.float32], tau: float) -> list[Divergence]:
    """DESIGN 12.3: teacher-forced on our output, no log-probability of ours is further than `tau` from the
    reference's, and a token differs only where the reference's margin is below 2 tau. Returns those that do.

    `logits` [tokens, vocabulary]: row i is what the reference makes of everything before our token i.
    """
    if len(logits) != len(outputs):
        raise Different(f"{len(logits)} rows of logits for {len(outputs)} tokens")
    logprobs = logits - np.logaddexp.reduce(logits.astype(np.float64), axis=1, keepdims=True)
    divergences = []
    for index, (output, row) in enumerate(zip(outputs, logprobs, strict=True)):
        assert output.logprob is not None
        assert output.top is not None
        for token, logprob in [(output.token_id, output.logprob), *output.top]:
            if abs(logprob - row[token]) >= tau:
                raise Different(f"token {index}: log-probability of {token}: {logprob}, not {row[token]}")
        best = int(row.argmax())
        if best != output.token_id:
            margin = float(row[best] - row[output.token_id])
            if margin >= 2 * tau:
                raise Different(f"token {index}: {output.token_id}, not {best}: no tie ({margin})")
            divergences.append(Divergence(index, output.token_id, best, margin))
    return divergences
