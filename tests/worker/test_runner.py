"""The persistent batch, ticks and batch invariance, on a small random model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pdserve.engine.plan import NewSequence, Plan, Work
from pdserve.engine.sampling import SamplingParams
from pdserve.errors import WorkerError
from pdserve.models.llama import LlamaModel
from pdserve.models.loader import load_model
from tests.models.checkpoints import random_tokens, reference_logits, write_checkpoint
from tests.worker.rig import GREEDY, Rig


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model"), num_attention_heads=6, hidden_size=60, num_key_value_heads=2
    )


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LlamaModel:
    return load_model(model_dir)


def test_rows_do_not_see_their_batch(model: LlamaModel) -> None:
    """Random mixed steps: logits and KV bytes equal those of each text computed alone, token by token."""
    rng = np.random.default_rng(11)
    texts = {seq: random_tokens(int(rng.integers(1, 150)), seed=seq) for seq in range(1, 7)}
    expected = {}
    for seq, tokens in texts.items():
        alone = Rig(model, seed=seq)
        alone.force(seq, tokens, [1] * len(tokens))
        expected[seq] = (alone.logits, alone.kv(seq, len(tokens)))
    for trial in range(4):
        rig = Rig(model, seed=100 + trial, page_size=[16, 8, 4, 32][trial], num_pages=300)
        rig.step(new=[rig.new(seq, tokens) for seq, tokens in texts.items()])
        done = dict.fromkeys(texts, 0)
        while unfinished := [seq for seq in texts if done[seq] < len(texts[seq])]:
            work = []
            for seq in rng.permutation(unfinished)[: int(rng.integers(1, 7))]:
                left = len(texts[seq]) - done[seq]
                count = min(left, int(rng.choice([1, 1, 2, 5, 16, 40, 100])))
                work.append(Work(int(seq), done[seq], count, bool(rng.integers(2)) or count == left))
                done[seq] += count
            rig.step(*work)
        for seq, tokens in texts.items():
            _, kv = expected[seq]
            assert rig.kv(seq, len(tokens)) == kv
        assert len(rig.logits) > 6
        for (seq, position), row in rig.logits.items():
            assert row.tobytes() == expected[seq][0][seq, position].tobytes()


def test_generation_equals_the_reference(model: LlamaModel, model_dir: Path) -> None:
    prompt = random_tokens(21)
    rig = Rig(model)
    tokens = [rig.step(Work(1, 0, 21, True), new=[rig.new(1, prompt)])[0].token]
    for step in range(20):
        more = [rig.more(1)] if (21 + step) % 16 == 0 else []
        tokens += [output.token for output in rig.step(Work(1, 21 + step, 1, True), pages=more)]
    reference = reference_logits(model_dir, prompt + tokens)
    assert tokens == [int(token) for token in reference[20:-1].argmax(1)]


def test_steps_may_be_planned_before_their_tokens_are_known(model: LlamaModel) -> None:
    """The plan names the position; the token is the one the worker sampled, even past an end-of-text."""
    rig = Rig(model)
    prompt = random_tokens(10)
    first = rig.step(Work(1, 0, 10, True), new=[rig.new(1, prompt, room=6)])
    second = rig.step(Work(1, 10, 1, True))
    other = Rig(model)
    known = [*prompt, first[0].token]
    assert other.step(Work(1, 0, 11, True), new=[other.new(1, known)])[0].token == second[0].token
    # Ended by the node only now, as it saw the second result; the id is used again in the same plan.
    again = rig.step(Work(1, 0, 10, True), finished=[1], new=[rig.new(1, prompt)])
    assert again[0].token == first[0].token


def test_every_step_makes_all_its_ticks(model: LlamaModel) -> None:
    rig = Rig(model)
    layers = model.num_layers
    rig.step()
    rig.step(Work(1, 0, 5, False), new=[rig.new(1, random_tokens(9), None)])
    rig.step(Work(1, 5, 4, False))
    rig.step(finished=[1])
    assert rig.ticks == list(range(layers + 1)) * 4


def test_a_layer_is_complete_when_it_ticks(model: LlamaModel) -> None:
    rig = Rig(model)
    seen: list[bytes] = []
    rig.runner._on_layer = lambda _layer: seen.append(bytes(rig.arena))
    rig.step(Work(1, 0, 20, False), new=[rig.new(1, random_tokens(20), None)])
    size = len(rig.arena) // model.num_layers
    for layer in range(model.num_layers):
        own = slice(layer * size, (layer + 1) * size)
        assert seen[layer][own] == seen[-1][own]
        assert any(seen[layer][own])
        assert not any(seen[layer][own.stop :])


def test_only_own_pages_are_written(model: LlamaModel) -> None:
    rig = Rig(model)
    rig.step(Work(1, 0, 20, True), new=[rig.new(1, random_tokens(20))])
    layout = np.frombuffer(rig.arena, np.uint8).reshape(model.num_layers, rig.num_pages, -1)
    written = set(np.flatnonzero(layout.any(axis=(0, 2))).tolist())
    assert written == set(rig.tables[1])


def test_prefill_elsewhere_last_token_here(model: LlamaModel) -> None:
    """A sequence may start with n-1 tokens of KV that somebody else wrote into its pages."""
    prompt = random_tokens(40)
    source, target = Rig(model, seed=1), Rig(model, seed=2)
    source.step(Work(1, 0, 39, False), new=[source.new(1, prompt[:39], None)])
    new = target.new(1, prompt)
    card = model.card
    shape = (model.num_layers, 64, card.num_kv_heads, 2, 16, card.head_dim)
    ours = np.frombuffer(target.arena, np.float32).reshape(shape)
    theirs = np.frombuffer(source.arena, np.float32).reshape(shape)
    ours[:, target.tables[1]] = theirs[:, source.tables[1]]
    both = Rig(model, seed=3)
    assert target.step(Work(1, 39, 1, True), new=[new]) == both.step(
        Work(1, 0, 40, True), new=[both.new(1, prompt)]
    )
    assert target.logits[1, 39].tobytes() == both.logits[1, 39].tobytes()


def test_warm_up_leaves_nothing_behind(model: LlamaModel) -> None:
    rig = Rig(model)
    rig.runner.warm_up()
    assert not any(rig.arena)
    assert rig.ticks == []
    assert rig.logits == {}
    rig.step(Work(0, 0, 3, True), new=[rig.new(0, random_tokens(3))])
    rig.runner.warm_up()
    assert rig.step(Work(0, 3, 1, True))


def test_close_frees_the_arena(model: LlamaModel) -> None:
    rig = Rig(model)
    rig.step(Work(1, 0, 3, True), new=[rig.new(1, [1, 2, 3])])
    rig.runner.close()
    rig.arena.clear()  # BufferError while anything still looks into it


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Work(2, 0, 1, True), "sequence 2 is not in the batch"),
        (Work(1, 5, 1, True), "past its 5 known tokens"),
        (Work(1, 0, 0, True), "nothing to compute"),
        (Work(1, -1, 1, True), "nothing to compute"),
        (Work(3, 0, 40, False), "past its 2 pages of 16"),
        (Work(4, 0, 600, False), "past the model length 512"),
        (Work(5, 0, 4, True), "no sampling parameters"),
    ],
)
def test_a_wrong_plan_is_named(model: LlamaModel, work: Work, message: str) -> None:
    rig = Rig(model)
    new = [rig.new(1, random_tokens(5)), rig.new(4, random_tokens(600)), rig.new(5, random_tokens(4), None)]
    new.append(NewSequence(3, random_tokens(40), 40, [1, 2], GREEDY))
    rig.step(new=new)
    with pytest.raises(WorkerError, match=message):
        rig.step(work)
    assert not any(rig.arena)


def test_wrong_pages_and_repeated_sequences_are_named(model: LlamaModel) -> None:
    rig = Rig(model)
    for page in (0, -1, 64):
        with pytest.raises(WorkerError, match=rf"page {page} is not in \[1, 64\)"):
            rig.step(new=[NewSequence(1, [1], 1, [page], GREEDY)])
    rig.step(new=[rig.new(1, [1])])
    with pytest.raises(WorkerError, match="sequence 1 is already in the batch"):
        rig.step(new=[rig.new(1, [1])])


def test_sampling_is_per_sequence_and_batch_independent(model: LlamaModel) -> None:
    hot = SamplingParams(temperature=1.3, top_p=0.95, seed=5, logprobs=2, repetition_penalty=1.2)
    prompt = random_tokens(12)

    def generate(rig: Rig, companions: int) -> list[int]:
        new = [rig.new(1, prompt, hot, room=20)]
        new += [rig.new(10 + i, random_tokens(8, seed=i), GREEDY, room=30) for i in range(companions)]
        work = [Work(1, 0, 12, True)] + [Work(10 + i, 0, 8, True) for i in range(companions)]
        tokens = [rig.step(*reversed(work), new=new)[-1].token]
        for step in range(15):
            work = [Work(10 + i, 8 + step, 1, True) for i in range(companions)]
            tokens.append(rig.step(*work, Work(1, 12 + step, 1, True))[-1].token)
        return tokens

    alone = generate(Rig(model), 0)
    assert generate(Rig(model, seed=4), 5) == alone
    assert len(set(alone)) > 3
    # After a preemption the output comes back as known tokens; the rest of the text is the same.
    resumed = Rig(model)
    known = prompt + alone[:6]
    rest = [
        resumed.step(Work(1, 0, 18, True), new=[resumed.new(1, known, hot, prompt_len=12, room=20)])[0].token
    ]
    rest += [resumed.step(Work(1, 18 + step, 1, True))[0].token for step in range(9)]
    assert rest == alone[6:]


def test_forced_text_is_not_overwritten(model: LlamaModel) -> None:
    rig = Rig(model)
    tokens = random_tokens(30)
    rig.force(1, tokens, [10, 20])
    whole = Rig(model)
    whole.force(1, tokens, [30])
    assert rig.logits[1, 29].tobytes() == whole.logits[1, 29].tobytes()


def test_kernels_run_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """A read-only home and package: slower to start, not an error."""
    code = """
import numpy, os
from pathlib import Path
def refuse(*_a, **_k): raise PermissionError(13, "read-only")
Path.mkdir = refuse
from pdserve.layers import jit, kernels
assert jit._DIRECTORY is None
x = numpy.ones((2, 3), numpy.float32)
kernels.add_in_place(x, x.copy())
assert x.sum() == 12
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "none")}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment, timeout=100)
    assert not list(tmp_path.iterdir())


def test_plans_of_no_work_only_forget(model: LlamaModel) -> None:
    rig = Rig(model)
    rig.step(new=[rig.new(1, [1, 2, 3])])
    assert rig.runner.execute(Plan(7, [], [], [1, 99], [])) == []
    with pytest.raises(WorkerError, match="not in the batch"):
        rig.step(Work(1, 0, 1, False))
