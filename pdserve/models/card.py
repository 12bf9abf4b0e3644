"""What a model is, read from its config.json without torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from pdserve.errors import ModelError


class RopeCard(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding. `kind` "default" uses only `theta`; "llama3" the rest too (frequency bands)."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a decoder-only model that every part of a node needs."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeCard
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's own: "float16", "bfloat16" or "float32"."""


def load_card(model_dir: str | Path) -> ModelCard:
    """Read `config.json`, and the EOS ids of `generation_config.json` where there is one.

    Both spellings are read: `rope_parameters` and `dtype` (transformers 5) or `rope_theta`, `rope_scaling`
    and `torch_dtype` (4). Raises `ModelError` naming the file, the field, what was expected and what was
    found.
    """
    config_file = Path(model_dir) / "config.json"
    config = _Fields(_read_json(config_file), config_file)
    architecture = config.architecture()
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"{config_file}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = config.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{config_file}: head_dim is {head_dim}; rotary embedding needs an even one")
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    config.expect("quantization_config", None)
    return ModelCard(
        architecture=architecture,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings", default=2048),
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope=_rope(config),
        tie_word_embeddings=bool(config.fields.get("tie_word_embeddings", False)),
        bos_token_id=config.fields.get("bos_token_id"),
        eos_token_ids=_eos_ids(config, Path(model_dir) / "generation_config.json"),
        dtype=_dtype(config),
    )


class _Fields:
    """config.json's fields, with errors that name file and field."""

    def __init__(self, fields: dict[str, Any], file: Path) -> None:
        self.fields = fields
        self.file = file

    def architecture(self) -> str:
        names = self.fields.get("architectures") or []
        if names != ["LlamaForCausalLM"]:
            found = names or self.fields.get("model_type")
            raise ModelError(f"{self.file}: architectures is {found!r}; supported: ['LlamaForCausalLM']")
        return str(names[0])

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.fields.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.file}: {name} is {value!r}; expected a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.fields.get(name)
        if value is None:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise ModelError(f"{self.file}: {name} is {value!r}; expected a positive number")
        return float(value)

    def expect(self, name: str, only: Any) -> None:
        value = self.fields.get(name, only)
        if value != only:
            raise ModelError(f"{self.file}: {name} is {value!r}; only {only!r} is supported")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: not a model directory") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object")
    return value


def _rope(config: _Fields) -> RopeCard:
    old = config.fields.get("rope_scaling") or {}
    new = config.fields.get("rope_parameters") or {}
    merged = {**old, **new}
    kind = merged.get("rope_type", merged.get("type", "default"))
    theta = merged.get("rope_theta", config.fields.get("rope_theta", 10000.0))
    rope = _Fields({**merged, "rope_theta": theta}, config.file)
    if kind == "default":
        return RopeCard(theta=rope.number("rope_theta", 10000.0))
    if kind == "llama3":
        return RopeCard(
            kind=kind,
            theta=rope.number("rope_theta", 10000.0),
            factor=rope.number("factor", 1.0),
            low_freq_factor=rope.number("low_freq_factor", 1.0),
            high_freq_factor=rope.number("high_freq_factor", 4.0),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        )
    raise ModelError(f"{config.file}: rope_type is {kind!r}; supported: 'default', 'llama3'")


def _eos_ids(config: _Fields, generation_file: Path) -> tuple[int, ...]:
    sources = [config.fields.get("eos_token_id")]
    if generation_file.exists():
        sources.append(_read_json(generation_file).get("eos_token_id"))
    ids: list[int] = []
    for source in sources:
        for token in source if isinstance(source, list) else [source]:
            if isinstance(token, int) and token not in ids:
                ids.append(token)
    return tuple(ids)


def _dtype(config: _Fields) -> str:
    name = str(config.fields.get("dtype") or config.fields.get("torch_dtype") or "float32").removeprefix(
        "torch."
    )
    if name not in ("float16", "bfloat16", "float32"):
        raise ModelError(f"{config.file}: dtype is {name!r}; supported: float16, bfloat16, float32")
    return name
