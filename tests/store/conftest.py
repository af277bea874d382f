from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from zerotune.store.sqlite.database import MEASUREMENT, Store

WRITE_WITHOUT_REST = """
import sys
import numpy as np
from zerotune.store.sqlite.writing import checkpoints
from zerotune.store.sqlite.database import MEASUREMENT, Store

checkpoints.EVERY_S = 0.0
store = Store.open(sys.argv[1])
block = np.zeros(500, MEASUREMENT)
block["n_ranks"], block["message_bytes"], block["collective"] = 8, 1024, 2
for number in range(1_000_000):
    block["step"] = number
    store.record_measurements("fabric", "job", block)
    store.flush()
    print(number + 1, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "store.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store.open(path) as opened:
        yield opened


@pytest.fixture(scope="session")
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


class RestlessWriter:
    """A process that commits 500 measurements after 500 more, step after step, and copies the log after each."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self._told = process.stdout

    def wait_for(self, n_batches: int) -> int:
        """How many batches it has committed, at least."""
        while (n_told := int(self._told.readline())) < n_batches:
            pass
        return n_told

    def kill(self) -> int:
        """By SIGKILL; how many batches it told of besides, 0 if none."""
        self._process.kill()
        return max([0, *map(int, self._told.read().split())])


@pytest.fixture
def restless_writer(path: Path) -> Iterator[RestlessWriter]:
    command = [sys.executable, "-c", WRITE_WITHOUT_REST, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield RestlessWriter(process)
        process.kill()
