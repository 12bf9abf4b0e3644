"""Which directories load, and what the error says where one doesn't."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.errors import ModelError
from pdserve.models.card import load_card
from pdserve.models.checkpoint import Checkpoint
from pdserve.models.loader import kv_page_bytes, load_model, resolve_kv_dtype
from tests.models.checkpoints import random_tokens, reference_logits, write_checkpoint
from tests.worker.rig import Rig


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_shards_and_progress(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, shard="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    seen: list[tuple[int, int]] = []
    model = load_model(directory, on_progress=lambda loaded, total: seen.append((loaded, total)))
    assert [loaded for loaded, _ in seen] == sorted(loaded for loaded, _ in seen)
    assert seen[-1] == (Checkpoint(directory).nbytes,) * 2
    tokens = random_tokens(20)
    reference = reference_logits(directory, tokens)
    assert np.abs(Rig(model).force(1, tokens, [20]) - reference[-1]).max() < 1e-4 * reference.std()


def test_both_spellings_of_the_configuration(model_dir: Path) -> None:
    new = load_card(model_dir)
    old = {"rope_theta": 10000.0, "torch_dtype": "float32", "rope_parameters": ..., "dtype": ...}
    change_config(model_dir, **old)
    assert load_card(model_dir) == new
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    change_config(model_dir, rope_scaling=scaling)
    assert load_card(model_dir).rope.kind == "llama3"
    change_config(model_dir, rope_scaling=..., rope_theta=..., rope_parameters={**scaling, "rope_theta": 5.0})
    assert (load_card(model_dir).rope.theta, load_card(model_dir).rope.factor) == (5.0, 8.0)
    assert new.eos_token_ids == (2,)
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert load_card(model_dir).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["QwenForCausalLM"]}, r"architectures is \['QwenForCausalLM'\]; supported"),
        ({"architectures": ..., "model_type": "gpt2"}, "architectures is 'gpt2'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type is 'yarn'; supported: 'default', 'll",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": ...},
            "rope_type is 'linear'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is None; expected a positive integer"),
        ({"hidden_size": "48"}, "hidden_size is '48'"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"head_dim": 9}, "head_dim is 9"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        (
            {"hidden_size": 52, "head_dim": 12},
            r"embed_tokens.weight has shape \[101, 48\]; expected \[101, 52\]",
        ),
        ({"vocab_size": 102}, r"has shape \[101, 48\]; expected \[102, 48\]"),
        ({"num_hidden_layers": 3}, r"tensor model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, r"unexpected tensor model.layers.1.+LlamaForCausalLM without it"),
    ],
)
def test_wrong_configurations_are_named(model_dir: Path, changes: dict[str, Any], message: str) -> None:
    change_config(model_dir, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(model_dir)
    assert str(model_dir) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model.norm.weight is missing; expected shape \[48\]"),
        (lambda t: t.update({"extra.bias": torch.zeros(3)}), r"unexpected tensor extra.bias \[3\]"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(48, 101)}),
            r"shape \[48, 101\]; expected \[101, 48\]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}), "is I8; expected F16"),
    ],
)
def test_wrong_weights_are_named(model_dir: Path, change: Callable[..., Any], message: str) -> None:
    change_weights(model_dir, change)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(model_dir)
    assert "model.safetensors" in str(caught.value)


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in Checkpoint(directory).tensors
    extras = {
        "lm_head.weight": torch.zeros(101, 48),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
    }
    change_weights(directory, lambda tensors: tensors.update(extras))
    load_model(directory)


def test_broken_files_are_named(model_dir: Path) -> None:
    weights = model_dir / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(ModelError, match=r"cut short: tensor .+ ends at byte"):
        load_model(model_dir)
    weights.write_bytes(whole[:5])
    with pytest.raises(ModelError, match="cut short"):
        load_model(model_dir)
    weights.write_bytes((10).to_bytes(8, "little") + b"not json!!" + bytes(10))
    with pytest.raises(ModelError, match="header cannot be read"):
        load_model(model_dir)
    weights.unlink()
    with pytest.raises(ModelError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_model(model_dir)
    index = model_dir / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(ModelError, match=r"names other.safetensors, which is not in"):
        load_model(model_dir)
    index.write_text("[]")
    with pytest.raises(ModelError, match=r"index.json cannot be read"):
        load_model(model_dir)
    (model_dir / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        load_model(model_dir)
    with pytest.raises(ModelError, match="is missing: not a model directory"):
        load_model(model_dir / "nowhere")


def test_chosen_types(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    assert load_model(directory).dtype == "float32"
    assert load_model(directory, dtype="float16").dtype == "float16"
    change_weights(directory, lambda tensors: tensors["lm_head.weight"].fill_(1e6))
    with pytest.raises(ModelError, match=r"lm_head.weight does not fit float16"):
        load_model(directory, dtype="float16")
    with pytest.raises(ModelError, match="dtype is 'int4'"):
        load_model(directory, dtype="int4")
    with pytest.raises(ModelError, match="tensor parallelism"):
        load_model(directory, tp=2)
    with pytest.raises(ModelError, match="kv_cache_dtype is 'fp8'"):
        resolve_kv_dtype("fp8")
    card = load_card(directory)
    assert kv_page_bytes(card, 16, "auto") == 2 * kv_page_bytes(card, 16, "float16") == 2 * 2 * 16 * 12 * 4
