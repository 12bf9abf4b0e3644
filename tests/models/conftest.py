from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pdserve.config import cache_directory
from pdserve.models.default import ensure_default_model

TEXT = """<|im_start|>user
In 1969, 2 people walked on the Moon. Who were they, and what did they leave behind?<|im_end|>
<|im_start|>assistant
Neil Armstrong and Buzz Aldrin landed in the Sea of Tranquility on July 20. They left a flag, a plaque,
a laser reflector and several instruments; Michael Collins stayed in orbit.
¿Y después? Naïve café — 東京, 1.5 × 10³ km.
<|im_end|>
"""


@pytest.fixture(scope="session")
def default_model() -> Path:
    return ensure_default_model(cache_directory())


@pytest.fixture(scope="session")
def default_text(default_model: Path) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(default_model / "tokenizer.json")).encode(TEXT).ids
    return ids
