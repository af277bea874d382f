"""Starts of a group are told apart on a store that a restart finds as it was left."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from zerotune.agent.nccl.emulated.transport import start

RANKS = (0, 1)
KEY = "emulated_nccl/start/0.1/2/0"
TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def dead() -> str:
    """What the first rank of an earlier start has left."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return f"old {process.pid} {psutil.Process(process.pid).create_time()}"


def test_a_dead_ranks_name_is_not_taken(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set(KEY, dead)
    asked = []

    def is_alive(*who: object, check=start.is_alive) -> bool:
        asked.append(who)
        if len(asked) == 3:  # only now the new first rank begins
            start.n_started.clear()
            new.append(start.name_start(store, "g", RANKS, 0, 2, TIMEOUT))
        return check(*who)

    new: list[str] = []
    monkeypatch.setattr(start, "is_alive", is_alive)
    start.n_started.clear()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(start.name_start, store, "g", RANKS, 1, 2, TIMEOUT).result(20)
    assert taken == new[0] != "old"
    assert len(asked) == 4
