from __future__ import annotations

import pytest

from pdserve.text.tokenizer import Tokenizer
from tests import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small_tokenizer.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small_tokenizer.byte_fallback(tmp_path_factory.mktemp("byte_fallback")))
