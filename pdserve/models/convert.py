"""GGUF to a HF-style directory: config, float16 weights, tokeniser, chat template. numpy only.

Format and names of GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. llama.cpp's converter
interleaves the rows of q and k within each head, because it rotates neighbouring pairs; here they go back to
HF's order, which rotates element d with element d + dim/2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.errors import ModelError
from pdserve.models.tokenizer_gguf import build_tokenizer, token_of

CONVERTER_VERSION = 1
"""Part of the directory's name: a changed converter must not find its predecessor's work."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufFields:
    """The metadata of a GGUF file; a missing key is a `ModelError` that names it."""

    def __init__(self, reader: Any, file: Path) -> None:
        self._fields = reader.fields
        self._file = file

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self._file}: metadata key {key} is missing")
        return value


def convert_gguf(gguf_file: Path, target: Path) -> None:
    """Fill the existing, empty directory `target` from a Llama GGUF. Not atomic: the caller renames."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    fields = GgufFields(reader, gguf_file)
    architecture = fields.need("general.architecture")
    if architecture != "llama":
        raise ModelError(f"{gguf_file}: general.architecture is {architecture!r}; supported: 'llama'")
    tensors = {_hf_name(tensor.name, gguf_file): tensor for tensor in reader.tensors}
    config = _config(fields, tied="lm_head.weight" not in tensors)
    eos_ids = config["eos_token_id"]
    _write_json(target / "config.json", config)
    _write_json(
        target / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": eos_ids,
            "pad_token_id": config["pad_token_id"],
        },
    )
    arrays = {name: _array(name, tensor, config) for name, tensor in tensors.items()}
    weights = target / "model.safetensors"
    save_file(arrays, weights, metadata={"format": "pt"})
    weights.chmod((target / "config.json").stat().st_mode & 0o777)  # save_file makes it private
    build_tokenizer(fields).save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(fields, config))


def _config(fields: GgufFields, *, tied: bool) -> dict[str, Any]:
    """config.json in the spelling that transformers 4 and 5 both read."""
    hidden = fields.need("llama.embedding_length")
    heads = fields.need("llama.attention.head_count")
    eos = fields.need("tokenizer.ggml.eos_token_id")
    unknown = fields.get("tokenizer.ggml.unknown_token_id", eos)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields.need("llama.feed_forward_length"),
        "num_hidden_layers": fields.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": fields.need("llama.context_length"),
        "rms_norm_eps": _shortest(fields.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(fields.get("llama.rope.freq_base", 10000.0)),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": len(fields.need("tokenizer.ggml.tokens")),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        # The end of a turn, and the end of a text, which also serves as the unknown token of this vocabulary.
        "eos_token_id": sorted({eos, unknown}, reverse=True),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos),
        "torch_dtype": "float16",
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _tokenizer_config(fields: GgufFields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "bos_token": token_of(fields, "bos"),
        "eos_token": token_of(fields, "eos"),
        "unk_token": token_of(fields, "unknown"),
        "pad_token": token_of(fields, "padding"),
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.need("tokenizer.chat_template"),
    }


def _hf_name(name: str, file: Path) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise ModelError(f"{file}: unexpected tensor {name} in a llama model")


def _array(name: str, tensor: Any, config: dict[str, Any]) -> NDArray[Any]:
    """Dequantised; matrices rounded to float16, norms left in float32."""
    from gguf import quants

    values: NDArray[np.float32] = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    values = values.reshape(tuple(int(length) for length in reversed(tensor.shape)))
    if name.endswith("q_proj.weight"):
        values = _restore_halves(values, config["num_attention_heads"])
    elif name.endswith("k_proj.weight"):
        values = _restore_halves(values, config["num_key_value_heads"])
    return np.ascontiguousarray(values if values.ndim == 1 else values.astype(np.float16))


def _restore_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the interleaving of a head's rows: 0, 2, 4, … are its first half, 1, 3, 5, … its second."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
