"""DESIGN 12 for forty prompts: a prefill node and a decode node against one node that does all, and both
against transformers.

The nodes cut prompts differently on purpose (steps of 128 tokens at page boundaries, steps of 100 anywhere);
in the batch-invariant mode that must not change a bit.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from pdserve.node.node import Node
from pdserve.text.tokenizer import Tokenizer
from tests.e2e.cluster import Cluster, serving
from tests.e2e.exactness import check_greedy
from tests.e2e.prompts import (
    PREFILL_CHUNK,
    SINGLE_CHUNK,
    SINGLE_NAMES,
    batch_prompts,
    single_prompts,
)
from tests.e2e.watch import Outcome, compare

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

MAX_TOKENS = 5

TAU = 1e-3
"""How far a log-probability may be from transformers' in float32 with the same weights.

Fixed from transformers alone, before anything of ours was compared: for a text of 53 tokens (logits with a
standard deviation of 6.6) its own `eager` and `sdpa` attention differ by up to 6e-5, and computing the text
at once or token by token with a cache by up to 1.2e-4. That is what another order of sums costs. Our matrix
products have another order too, and prompts are up to thirty times as long: eight times that.
"""


class Reference:
    """transformers, on the same directory."""

    def __init__(self, model: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            from transformers import LlamaForCausalLM

            self._torch = torch
            self._model: Any = LlamaForCausalLM.from_pretrained(
                model, dtype=torch.float32, attn_implementation="sdpa"
            )
        self._model.train(False)

    def logits(self, outcome: Outcome) -> NDArray[np.float32]:
        """[tokens, vocabulary], teacher-forced on the tokens of the decode node."""
        tokens = [*outcome.prompt, *(output.token_id for output in outcome.outputs[:-1])]
        torch = self._torch
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more of them spin, and starve the nodes where cores are few
        try:
            return self._forward(tokens, len(outcome.outputs))
        finally:
            torch.set_num_threads(threads)

    def _forward(self, tokens: list[int], rows: int) -> NDArray[np.float32]:
        with self._torch.no_grad():
            answer = self._model(self._torch.tensor([tokens]), logits_to_keep=rows, use_cache=False)
        logits: NDArray[np.float32] = answer.logits[0].numpy()
        return logits


@pytest.fixture(scope="module")
def reference(default_model: Path) -> Reference:
    return Reference(default_model)


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(default_model: Path) -> AsyncIterator[Cluster]:
    async with serving(
        default_model,
        prefill={"max_num_batched_tokens": PREFILL_CHUNK},
        both={"max_num_batched_tokens": SINGLE_CHUNK},
        cluster={"dead_s": 60.0},
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inline_pair(default_model: Path) -> AsyncIterator[tuple[Node, Node]]:
    """Another two nodes, whose event loop moves the data itself."""
    async with serving(
        default_model,
        mode="inline",
        prefill={"max_num_batched_tokens": PREFILL_CHUNK},
        cluster={"dead_s": 60.0},
    ) as cluster:
        (source,), (target,) = cluster.prefill, cluster.decode
        assert source.fabric is not None
        assert source.fabric.info.mode == "inline"
        yield source, target


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    found = single_prompts(lambda text: tokenizer.rust.encode(text).ids)
    assert list(found) == SINGLE_NAMES
    return found


async def check(outcomes: dict[str, Outcome], reference: Reference, listed: list[str]) -> None:
    """Raises Different; what is none is put on the list, near-ties above all."""
    for name, outcome in outcomes.items():
        outcome.check()
        assert len(outcome.outputs) == MAX_TOKENS
        # On a thread, because the nodes' heartbeats share this loop.
        logits = await asyncio.to_thread(reference.logits, outcome)
        agreement = check_greedy(outcome.outputs, logits, TAU)
        listed.append(f"{name}: log-probabilities within {agreement.worst:.1e}")
        listed += [f"{name}: near-tie: {divergence}" for divergence in agreement.divergences]


@pytest.mark.parametrize("name", SINGLE_NAMES)
async def test_a_prompt_is_the_same_on_two_nodes_and_on_one(
    name: str,
    cluster: Cluster,
    prompts: dict[str, list[int]],
    reference: Reference,
    transformers_agreement: list[str],
) -> None:
    outcomes = await compare(cluster, {name: prompts[name]}, MAX_TOKENS)
    await check(outcomes, reference, transformers_agreement)


async def test_sixteen_prompts_at_once(
    cluster: Cluster, tokenizer: Tokenizer, reference: Reference, transformers_agreement: list[str]
) -> None:
    prompts = batch_prompts(lambda text: tokenizer.rust.encode(text).ids)
    together = await compare(cluster, prompts, MAX_TOKENS)
    await check(together, reference, transformers_agreement)


async def test_inline_mode_is_the_same(
    cluster: Cluster, inline_pair: tuple[Node, Node], prompts: dict[str, list[int]]
) -> None:
    some = {name: prompts[name] for name in ("one token", "a page sent", "japanese", "two chunks sent")}
    for outcome in (await compare(cluster, some, MAX_TOKENS, pair=inline_pair)).values():
        outcome.check()


async def test_forty_prompts(tokenizer: Tokenizer) -> None:
    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.rust.encode(text).ids
        return ids

    assert len(single_prompts(encode)) + len(batch_prompts(encode)) == 40
