"""A `tokenizers` tokeniser from GGUF metadata.

GGUF names the pre-tokeniser (how text is split before byte-pair merges) by a word, `tokenizer.ggml.pre`. What
the word means is in llama.cpp's sources; a converter that ignores it splits numbers wrongly. Only words whose
meaning has been checked are in the table; any other is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdserve.errors import ModelError

if TYPE_CHECKING:
    from pdserve.models.convert import GgufFields

_CONTROL, _USER_DEFINED = 3, 4


def build_tokenizer(fields: GgufFields) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer`; it adds no special tokens of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    kind = fields.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(f"tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level BPE)")
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    types: list[int] = fields.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ")) for merge in fields.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(fields.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer


def token_of(fields: GgufFields, role: str) -> str | None:
    """The text of the token that has this role ("bos", "eos", "unknown", "padding"), if any."""
    index = fields.get(f"tokenizer.ggml.{role}_token_id")
    return None if index is None else str(fields.need("tokenizer.ggml.tokens")[index])


def _pre_tokenizer(name: str) -> Any:
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelError(f"tokenizer.ggml.pre is {name!r}; known pre-tokenisers: {known}")
    return _PRE_TOKENIZERS[name]()


def _gpt2() -> Any:
    """GPT-2's own split: words with their leading space, runs of digits, runs of punctuation."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    """Every digit is a piece by itself; the rest is split as GPT-2 does."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {"gpt-2": _gpt2, "smollm": _single_digits}
