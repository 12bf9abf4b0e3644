"""The tokeniser of a model directory: `tokenizer.json`, `tokenizer_config.json`, the chat template.

The work is done by the Rust library `tokenizers`; this adds what a server needs around it: the bytes of a
single token, which ids are special, a bound on how long a text can be and still fit, and an encoder that
keeps the event loop free.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from pdserve.errors import ModelError
from pdserve.text.template import ChatTemplate


def _byte_level_alphabet() -> dict[str, int]:
    """character → byte of byte-level BPE (GPT-2, "Language Models are Unsupervised Multitask Learners", 2.2).

    Printable Latin-1 bytes stand for themselves; the other 68 are moved, in order, to U+0100 and up.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in plain}
    moved = [b for b in range(256) if b not in set(plain)]
    table.update({chr(0x100 + i): b for i, b in enumerate(moved)})
    return table


_ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """Text to token ids and back, for one model. Immutable, so shared by all requests of a node.

    `byte_level`: every token stands for a fixed string of bytes whatever its neighbours are, so text can be
    put together byte by byte (Llama 3, Qwen, DeepSeek, SmolLM2). Otherwise (SentencePiece models) a token's
    text depends on its neighbours.
    """

    def __init__(self, rust: RustTokenizer, config: dict[str, Any], template: str | None) -> None:
        self.rust = rust
        described = json.loads(rust.to_str())
        decoder = described.get("decoder") or {}
        self.byte_level = decoder.get("type") == "ByteLevel"
        added = rust.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        vocabulary = rust.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        # A normaliser may shorten text, so only without one does the longest token bound a text's length.
        longest = max(map(len, vocabulary), default=1)
        self._max_chars_per_token = longest if described.get("normalizer") is None else None
        self.special_tokens = _special_tokens(config)
        self.template = None if template is None else ChatTemplate(template, self.special_tokens)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read a Hugging Face model directory. Blocks; raises `ModelError` naming the file."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path}: not found; a model directory needs a fast tokeniser (tokenizer.json)")
        try:
            rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare Exception.
            raise ModelError(f"{path}: {error}") from error
        # A saved tokenizer.json may carry the padding and truncation of some training run.
        rust.no_padding()
        rust.no_truncation()
        config = _read_json(model_dir / "tokenizer_config.json")
        return cls(rust, config, _template_source(model_dir, config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` puts BOS and the like where the model wants them."""
        ids: list[int] = self.rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    async def encode_off_loop(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`encode` in the loop's default executor, for long texts.

        The thread runs one call of the Rust library, which lets go of the GIL (`encode_batch*` does, `encode`
        does not), and no logic of pdserve. Cancelled, the call runs on to its end and its result is dropped.
        """
        loop = asyncio.get_running_loop()
        encoded = await loop.run_in_executor(
            None, lambda: self.rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        )
        ids: list[int] = encoded[0].ids
        return ids

    def surely_longer_than(self, text: str, limit: int) -> bool:
        """True if `text` cannot have `limit` tokens or fewer, found without tokenising it."""
        return self._max_chars_per_token is not None and len(text) > limit * self._max_chars_per_token

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; incomplete or invalid UTF-8 becomes U+FFFD, unknown ids nothing."""
        text: str = self.rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (possibly part of a character); empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; what is not a whole character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _find_bytes(self, token_id: int) -> bytes:
        token: str | None = self.rust.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            mapped = [_ALPHABET.get(c) for c in token]
            # An added token may hold characters outside the alphabet; then it stands for itself.
            return token.encode() if None in mapped else bytes(b for b in mapped if b is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as strings (a config spells each as a string or as an AddedToken dict)."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_source(model_dir: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over `chat_template` in the config, as in Hugging Face's loader."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):  # Named templates: [{"name": "default", "template": ...}, ...]
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value
