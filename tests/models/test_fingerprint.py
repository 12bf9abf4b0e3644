"""The model fingerprint: same numbers, same word, wherever and however they are stored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.models import fingerprint as module
from pdserve.models.fingerprint import fingerprint
from tests.models.checkpoints import write_checkpoint


def test_it_is_of_the_numbers_not_the_files(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    whole = write_checkpoint(tmp_path / "whole")
    sharded = write_checkpoint(tmp_path / "sharded", shard="20KB")
    other = write_checkpoint(tmp_path / "other", rms_norm_eps=1e-3)
    value = fingerprint(whole, cache)
    assert len(value) == 32
    assert fingerprint(sharded, cache) == value
    assert fingerprint(other, cache) != value
    (whole / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert fingerprint(whole, tmp_path / "another cache") == value


def test_one_flipped_bit_shows(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    before = fingerprint(directory, tmp_path)
    weights = directory / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint(directory, tmp_path) != before


def test_hashed_once_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path / "model")
    value = fingerprint(directory, tmp_path)
    real, hashed = module._hash, []
    monkeypatch.setattr(module, "_hash", lambda card, checkpoint: hashed.append(1) or real(card, checkpoint))
    assert fingerprint(directory, tmp_path) == value
    assert hashed == []
    os.utime(directory / "model.safetensors", ns=(1, 1))
    assert fingerprint(directory, tmp_path) == value
    assert hashed == [1]
    (memo,) = (tmp_path / "fingerprints").iterdir()
    memo.write_text("rubbish")
    assert fingerprint(directory, tmp_path) == value
    assert hashed == [1, 1]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model")
    file = tmp_path / "file"
    file.write_text("")
    assert fingerprint(directory, file) == fingerprint(directory, tmp_path)
