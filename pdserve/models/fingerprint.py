"""A hash that says whether two nodes serve the same model."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

import msgspec

from pdserve.models.card import ModelCard, load_card
from pdserve.models.checkpoint import Checkpoint

_VERSION = 1


def fingerprint(model_dir: str | Path, cache_dir: str | Path) -> str:
    """BLAKE2b (32 hex digits) over the architecture's facts and every tensor's name, type, shape and bytes.

    How tensors are spread over files does not matter; neither do EOS ids, the tokeniser or other side files.
    The result is kept under `cache_dir` by size, modification time and inode of each file, since hashing
    reads all weights (about a second a gigabyte). A cache that can't be written costs time only. Raises
    `ModelError`.
    """
    directory = Path(model_dir).resolve()
    card = load_card(directory)
    checkpoint = Checkpoint(directory)
    state = _state(directory, checkpoint)
    name = hashlib.blake2b(os.fsencode(directory), digest_size=16).hexdigest()
    memo = Path(cache_dir) / "fingerprints" / f"{name}.json"
    known = _recall(memo, state)
    if known is not None:
        return known
    value = _hash(card, checkpoint)
    _remember(memo, state, value)
    return value


def _state(directory: Path, checkpoint: Checkpoint) -> list[list[str | int]]:
    files = [directory / "config.json", *checkpoint.files]
    state: list[list[str | int]] = [["version", _VERSION]]
    for file in files:
        facts = file.stat()
        state.append([file.name, facts.st_size, facts.st_mtime_ns, facts.st_ino])
    return state


def _hash(card: ModelCard, checkpoint: Checkpoint) -> str:
    digest = hashlib.blake2b(digest_size=16)
    facts = msgspec.structs.replace(card, eos_token_ids=(), bos_token_id=None)
    digest.update(msgspec.json.encode([_VERSION, facts]))
    for name in sorted(checkpoint.tensors):
        entry = checkpoint.tensors[name]
        digest.update(msgspec.json.encode([name, entry.dtype, entry.shape]))
        digest.update(checkpoint.read(entry))
    return digest.hexdigest()


def _recall(memo: Path, state: list[list[str | int]]) -> str | None:
    try:
        kept = json.loads(memo.read_bytes())
        return str(kept["fingerprint"]) if kept["state"] == state else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(memo: Path, state: list[list[str | int]], value: str) -> None:
    with contextlib.suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memo.parent, delete=False) as stream:
            json.dump({"state": state, "fingerprint": value}, stream)
        os.replace(stream.name, memo)
