"""The progress bar of the weights, on a terminal; two log lines elsewhere."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

from pdserve.worker.protocol import LoadProgress

log = logging.getLogger(__name__)


class LoadingBar:
    """Shows a worker's LoadProgress. Use as a context manager."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._bar: tqdm[NoReturn] | None = None

    def progress(self, progress: LoadProgress) -> None:
        """Weights loaded so far."""
        if not self._terminal:
            if progress.loaded_bytes == progress.total_bytes:
                log.info("loaded %s: %.0f MiB", self._name, progress.total_bytes / 2**20)
            return
        if self._bar is None:
            self._bar = tqdm(total=progress.total_bytes, unit="B", unit_scale=True, desc=self._name)
        self._bar.update(progress.loaded_bytes - self._bar.n)

    def __enter__(self) -> LoadingBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
