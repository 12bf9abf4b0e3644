"""Small real tokenisers, built where a test needs one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. Pages leave layer by layer while the prompt is computed.",
    "user assistant system hello world, hello there: one two three 1234567890",
    "Ola, que tal? A páxina da caché viaxa á máquina que decodifica. ¡Señor! naïve café",
    "日本語のテキスト 中文文本 한국어 текст на русском 🙂🙃 👩‍👩‍👧 🇬🇱",
)


def byte_level(directory: Path, *, template: str | None = CHATML, vocab_size: int = 420) -> Path:
    """A byte-level BPE with ChatML's special tokens, as a model directory."""
    rust = Tokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    rust.train_from_iterator(list(_CORPUS) * 4, trainer)
    rust.add_tokens([AddedToken("plain added", special=False), AddedToken("añadido ☂", special=False)])
    return _save(rust, directory, template)


def byte_fallback(directory: Path) -> Path:
    """A SentencePiece-like vocabulary: word pieces with a mark for the space, bytes for everything else."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["\u2581hello", "\u2581world", "\u2581", "a", "b", ".", "\u2581the", "é"]
    rust = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    rust.add_special_tokens(["<s>", "</s>"])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(rust, directory, None)


def _save(rust: Tokenizer, directory: Path, template: str | None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    rust.save(str(directory / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
