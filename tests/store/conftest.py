from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from zerotune.store.sqlite.database import MEASUREMENT, Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as opened:
        yield opened


@pytest.fixture
def block() -> Callable[..., NDArray[np.void]]:
    def make(n: int = 4, **fields: object) -> NDArray[np.void]:
        made = np.zeros(n, MEASUREMENT)
        defaults = {
            "n_ranks": 8,
            "n_nodes": 1,
            "message_bytes": 1 << 20,
            "duration_us": np.arange(1.0, n + 1),
            "memory_pressure": 0.5,
            "collective": 2,
            "algorithm": 1,
            "protocol": 2,
            "n_channels": 8,
        }
        for name, value in (defaults | fields).items():
            made[name] = value
        return made

    return make
