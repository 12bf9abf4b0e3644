"""Safetensors files as maps of named tensors, read in place and without torch.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import ModelError

ITEM_SIZES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor's bytes lie: [start, end) of `file`, row-major, `dtype` in safetensors' names."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Checkpoint:
    """All tensors of a model directory: `model.safetensors`, or shards named by
    `model.safetensors.index.json`.

    Files are mapped privately on first use and stay mapped while anything refers to their bytes.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.directory = Path(model_dir)
        self.files = _files(self.directory)
        self.tensors: dict[str, TensorEntry] = {}
        for file in self.files:
            for entry in _read_header(file):
                if entry.name in self.tensors:
                    raise ModelError(
                        f"{file}: tensor {entry.name} is also in {self.tensors[entry.name].file}"
                    )
                self.tensors[entry.name] = entry
        self._maps: dict[Path, memoryview] = {}

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors.values())

    def read(self, entry: TensorEntry) -> memoryview:
        """The tensor's bytes, straight from the page cache; what is written stays in this process."""
        if entry.file not in self._maps:
            with entry.file.open("rb") as stream:
                self._maps[entry.file] = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))
        return self._maps[entry.file][entry.start : entry.end]


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelError(f"{directory} holds neither model.safetensors nor model.safetensors.index.json")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} cannot be read: {error!r}") from error
    files = [directory / str(name) for name in names]
    for file in files:
        if file.parent != directory or not file.exists():
            raise ModelError(f"{index} names {file.name}, which is not in {directory}")
    return files


def _read_header(file: Path) -> list[TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(f"{file} is cut short: {size} bytes, header of {length}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            return [_entry(file, name, fields, 8 + length, size) for name, fields in header.items()]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{file}: the header cannot be read: {error!r}") from error


def _entry(file: Path, name: str, fields: dict[str, Any], base: int, size: int) -> TensorEntry:
    begin, end = fields["data_offsets"]
    shape = tuple(int(length) for length in fields["shape"])
    dtype = str(fields["dtype"])
    if dtype not in ITEM_SIZES:
        raise ModelError(f"{file}: tensor {name} is {dtype}; supported: {', '.join(ITEM_SIZES)}")
    expected = math.prod(shape) * ITEM_SIZES[dtype]
    if not 0 <= begin <= end or end - begin != expected:
        raise ModelError(
            f"{file}: tensor {name} takes {end - begin} bytes, its shape {list(shape)} needs {expected}"
        )
    if base + end > size:
        raise ModelError(f"{file} is cut short: tensor {name} ends at byte {base + end}, the file at {size}")
    return TensorEntry(name, file, dtype, shape, base + begin, base + end)
