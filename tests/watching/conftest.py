from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    """Socket paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="zt-") as name:
        yield Path(name)
