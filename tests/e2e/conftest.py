"""The models that end-to-end tests serve."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.config import cache_directory
from pdserve.models.default import ensure_default_model
from tests.e2e.cluster import running_cluster
from tests.e2e.pair import KEY, Pair, pair_configs
from tests.e2e.tiny import write_tiny_model

_AGREEMENT = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def transformers_agreement(request: pytest.FixtureRequest) -> list[str]:
    """Lines about how well outputs agree with transformers', listed at the end of the run."""
    return request.config.stash.setdefault(_AGREEMENT, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if lines := config.stash.get(_AGREEMENT, []):
        terminalreporter.section("agreement with transformers")
        for line in sorted(lines):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """SmolLM2-135M-Instruct, converted."""
    return ensure_default_model(cache_directory())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Path:
    """A random Llama of six thin layers with the default model's tokeniser: what a test serves that is about
    anything but the text."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() == 2:  # transformers' own initial weights hardly tell tokens apart
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(default_model / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def tiny(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama (tests.e2e.tiny): its nodes start in a second or two."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), default_model)


@pytest.fixture(scope="session")
def other_tiny(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape."""
    return write_tiny_model(tmp_path_factory.mktemp("other-tiny"), default_model, seed=1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tiny: Path) -> AsyncIterator[Pair]:
    """One prefill and one decode node (tests.e2e.pair). Whoever uses them leaves them idle."""
    prefill, decode = pair_configs(tiny)
    async with running_cluster(prefill=[prefill], decode=[decode], gate=True, key=KEY) as cluster:
        yield Pair(cluster)
