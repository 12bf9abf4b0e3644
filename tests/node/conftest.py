from __future__ import annotations

import pytest

from pdserve.fabric import library


@pytest.fixture(scope="session", autouse=True)
def _libfabric() -> None:
    """Loading reads the disk: a node does it before its loop serves, and so do the tests of its parts."""
    library.load(None)
