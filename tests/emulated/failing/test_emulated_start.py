"""Starts of a group are told apart on a store that a restart finds as it was left."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from zerotune.agent.nccl.emulated import EmulatedNcclError
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

    def lives(*who: object, check=start.lives) -> bool:
        asked.append(who)
        if len(asked) == 3:  # only now the new first rank begins
            start.n_started.clear()
            new.append(start.name_start(store, "g", RANKS, 0, 2, TIMEOUT))
        return check(*who)

    new: list[str] = []
    monkeypatch.setattr(start, "lives", lives)
    start.n_started.clear()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(start.name_start, store, "g", RANKS, 1, 2, TIMEOUT).result(20)
    assert taken == new[0] != "old"
    assert len(asked) == 4


def test_another_process_under_the_number_of_a_dead_one_is_not_taken_for_it() -> None:
    began_s = psutil.Process().create_time()
    assert start.lives(os.getpid(), began_s)
    assert not start.lives(os.getpid(), began_s - 100.0)


def test_a_first_rank_that_cannot_be_seen_is_named(dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "STALE_NAME_S", 0.0)
    start.n_started.clear()
    store = dist.HashStore()
    store.set(KEY, dead)
    with pytest.raises(EmulatedNcclError, match="rank 0"):
        start.name_start(store, "g", RANKS, 1, 2, TIMEOUT)


def test_a_group_made_again_by_the_same_processes_has_another_name() -> None:
    store = dist.HashStore()
    names = {start.name_start(store, "again", RANKS, 0, 2, TIMEOUT) for _ in range(2)}
    assert len(names) == 2


def test_a_name_that_a_group_of_other_ranks_had_before_is_as_new() -> None:
    """torch counts groups anew as the default group is made again, and gives their names to other ranks."""
    store, others = dist.HashStore(), (0, 2)
    start.n_started.clear()
    start.name_start(store, "g", RANKS, 0, 2, TIMEOUT)
    name = start.name_start(store, "g", others, 0, 2, TIMEOUT)
    start.n_started.clear()  # rank 2 was in no group of this name
    assert start.name_start(store, "g", others, 1, 2, timedelta(seconds=1)) == name


@pytest.mark.parametrize("has_one_store", [True, False])
def test_a_rank_that_sat_a_world_out_finds_the_next_one(tmp_path, has_one_store: bool) -> None:
    """Worlds of three, two and three ranks, on one store or on one each: rank 2 has no part in the second."""

    stores = [dist.FileStore(str(tmp_path / str(number)), 3) for number in range(3)]

    def worlds(rank: int, *numbers: int) -> list[str]:
        start.n_started.clear()
        names = []
        for number in numbers:
            n_ranks = 2 if number == 1 else 3
            names.append(
                start.name_start(stores[0 if has_one_store else number], "0", (), rank, n_ranks, timedelta(seconds=2))
            )
        return names

    names = worlds(0, 0, 1, 2)
    assert len({*names}) == 3
    assert worlds(1, 0, 1, 2) == names
    assert worlds(2, 0, 2) == [names[0], names[2]]
