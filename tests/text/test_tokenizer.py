from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ModelError
from pdserve.text.tokenizer import Tokenizer
from tests import small_tokenizer


@given(text=st.text())
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_special_tokens_are_known_and_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>")
    assert {ids[0], ids[-1]} <= tokenizer.special_ids
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}


def test_unknown_ids_stand_for_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""


def test_bytes_of_a_byte_fallback_vocabulary(fallback_tokenizer: Tokenizer) -> None:
    assert not fallback_tokenizer.byte_level
    ids = [3 + b for b in "€".encode()]
    assert b"".join(map(fallback_tokenizer.token_bytes, ids)) == "€".encode()
    hello = fallback_tokenizer.rust.token_to_id("\u2581hello")
    assert fallback_tokenizer.token_bytes(hello) == b" hello"


async def test_encoding_off_the_loop_gives_the_same_and_leaves_the_loop_running(tokenizer: Tokenizer) -> None:
    text = "Pages leave layer by layer. 🙂 " * 2000
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count_turns())
        ids = await tokenizer.encode_off_loop(text)
        counting.cancel()
    assert ids == tokenizer.encode(text)
    assert turns > 10


def test_a_text_that_cannot_fit_is_found_without_tokenising(tokenizer: Tokenizer) -> None:
    text = "hello world " * 1000
    assert tokenizer.surely_longer_than(text, 10)
    assert not tokenizer.surely_longer_than(text, len(tokenizer.encode(text)))


def test_padding_and_truncation_of_a_training_run_are_dropped(tmp_path: Path) -> None:
    small_tokenizer.byte_level(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["truncation"] = {"max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    assert len(Tokenizer.load(tmp_path).encode("hello world, hello there")) > 2


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    small_tokenizer.byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    template = Tokenizer.load(tmp_path).template
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "from the file"


def test_named_templates_use_the_default(tmp_path: Path) -> None:
    small_tokenizer.byte_level(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = Tokenizer.load(tmp_path).template
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "plain"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "not found"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
    ],
)
def test_a_broken_directory_is_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    small_tokenizer.byte_level(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=says):
        Tokenizer.load(tmp_path)
