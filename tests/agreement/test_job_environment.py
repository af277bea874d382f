"""All ranks start with the same variables or none does, whoever is late, objects, gives up or was there before."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from zerotune.agent.agreement.exchange import Exchange
from zerotune.agent.agreement.job_environment import Agreed, agree

PROPOSED = "NCCL_BUFFSIZE=8388608"


def meet(
    store: dist.Store,
    n_ranks: int,
    *,
    delays_s: dict[int, float] | None = None,
    objections: dict[int, str] | None = None,
    remembers: Callable[[int, str], bool] = lambda number, variables: True,
    patience_s: float | dict[int, float] = 20.0,
) -> dict[int, Agreed]:
    """What each rank goes by; ranks with a negative delay never come."""
    found: dict[int, Agreed] = {}

    def run(rank: int) -> None:
        time.sleep((delays_s or {}).get(rank, 0.0))
        patient_s = patience_s.get(rank, 20.0) if isinstance(patience_s, dict) else patience_s
        proposal = PROPOSED if rank == 0 else "NCCL_NTHREADS=64"
        objection = (objections or {}).get(rank, "")
        exchange = Exchange(dist.PrefixStore("environment", store))
        found[rank] = agree(exchange, rank, n_ranks, proposal, lambda _: objection, remembers, patient_s)

    threads = [
        threading.Thread(target=run, args=(rank,)) for rank in range(n_ranks) if (delays_s or {}).get(rank, 0.0) >= 0.0
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_ranks_start_with_the_variables_that_rank_0_proposes() -> None:
    told: list[tuple[int, str]] = []
    found = meet(dist.HashStore(), 4, remembers=lambda *words: told.append(words) or True)
    assert {one.variables for one in found.values()} == {PROPOSED}
    assert told == [(1, PROPOSED)]


@pytest.mark.parametrize("who", [0, 2])
def test_one_objection_is_enough_and_rank_0_says_why(who: int) -> None:
    told: list[str] = []
    why = "NCCL_BUFFSIZE=1 is set by the user on b"
    found = meet(dist.HashStore(), 3, objections={who: why}, remembers=lambda _, what: told.append(what) or True)
    assert {one.variables for one in found.values()} == {""}
    assert found[0].why_not == why
    assert told == [""], "and the job is remembered as a usual one"


def test_variables_are_not_tried_without_a_daemon_that_remembers() -> None:
    found = meet(dist.HashStore(), 2, remembers=lambda number, variables: False)
    assert {one.variables for one in found.values()} == {""}
    assert "no daemon" in found[0].why_not


def test_a_missing_rank_keeps_nobody_for_long() -> None:
    for absent in (0, 2):
        began_s = time.monotonic()
        found = meet(dist.HashStore(), 3, delays_s={absent: -1.0}, patience_s=0.5)
        assert {one.variables for one in found.values()} == {""}
        assert time.monotonic() - began_s < 10.0


def test_an_earlier_start_of_the_job_decides_nothing() -> None:
    store = dist.HashStore()
    assert meet(store, 3)[1].variables == PROPOSED
    told: list[tuple[int, str]] = []
    again = meet(store, 3, objections={1: "the job was restarted"}, remembers=lambda *words: told.append(words) or True)
    assert {one.variables for one in again.values()} == {""}
    assert told == [(2, "")]


def test_all_ranks_go_by_the_same_whenever_one_gives_up() -> None:
    chance = random.Random(0)
    seen = set()
    for _ in range(12):
        told: list[str] = []
        found = meet(
            dist.HashStore(),
            3,
            delays_s={rank: chance.choice([0.0, 0.02, 0.05]) for rank in range(3)},
            remembers=lambda _, what, told=told: time.sleep(chance.choice([0.0, 0.05])) or told.append(what) or True,
            patience_s={rank: chance.choice([0.03, 0.1, 0.3, 1.0]) for rank in range(3)},
        )
        in_force = {one.variables for one in found.values()}
        assert len(in_force) == 1
        assert not told or told[-1] in in_force, "what is remembered is what ran"
        seen |= in_force
    assert seen == {"", PROPOSED}
