"""All interleavings of small jobs: each call under one plan on all ranks, nobody waits for training, offers come."""

from __future__ import annotations

import pytest
from change_model import Bounds, Model, Violation
from exploration import explore
from mutants import MUTANTS, ODD_OF_THREE
from plugin_model import Shape

from zerotune.store.records import NextStage, Plan

WORLD_2, WORLD_3, WORLD_4 = (Shape("w", tuple(range(n)), 1) for n in (2, 3, 4))
TRIAL = Plan(1, then=(NextStage(n_steps=1, n_rows=0),))
NEXT = Plan(3)


def alike(n_ranks: int, *threads: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Each rank runs these threads; a thread's program is a letter per call."""
    return (tuple(tuple(thread) for thread in threads),) * n_ranks


def program(*threads: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(thread) for thread in threads)


JOBS: dict[str, Bounds] = {
    "two ranks, unequal steps, two plans": Bounds((WORLD_2,), alike(2, "wwwwwwww"), (TRIAL, NEXT)),
    "an offer is withdrawn": Bounds((WORLD_2,), alike(2, "wwwwwww"), (TRIAL, None, Plan(5))),
    "a daemon without memory": Bounds((WORLD_2,), alike(2, "wwwwwww"), (NEXT, Plan(1), Plan(4))),
    "a plan within the epochs of the one before": Bounds((WORLD_2,), alike(2, "wwwwwww"), (TRIAL, Plan(2))),
    "three ranks, anything fails": Bounds(
        (WORLD_3,), alike(3, "wwww"), (TRIAL,), most_ahead=0, n_failures=1, n_repeats=1
    ),
    "two plans, anything fails twice": Bounds((WORLD_2,), alike(2, "wwww"), (TRIAL, NEXT), most_ahead=0, n_failures=2),
    "overlapping communicators, one without rank 0": Bounds(
        (Shape("a", (0, 1), 1), Shape("b", (1, 2), 2)),
        (program("aaaa"), program("abab", "b"), program("bbbb")),
        (TRIAL,),
        most_ahead=0,
        n_failures=1,
        n_repeats=1,
    ),
    "two threads, a communicator each": Bounds(
        (Shape("a", (0, 1), 1), Shape("b", (0, 1), 2)),
        alike(2, "aa", "bb"),
        (TRIAL,),
        most_ahead=1,
        n_failures=1,
        n_repeats=1,
    ),
    "a rank ends early, another closes": Bounds(
        (Shape("a", (0, 1), 1), Shape("b", (0, 1, 2), 2)),
        (program("aaaa", "bb"), program("aaaa", "bb"), program("bb")),
        (TRIAL,),
        most_ahead=0,
        n_failures=1,
        n_repeats=1,
        closes=(0, 1, 2),
    ),
    "a communicator is destroyed in the middle": Bounds(
        (WORLD_2, Shape("a", (0, 1), 2)), (program("wawAww"), program("wawAww")), (TRIAL,), n_failures=1
    ),
    "communicators without a name": Bounds(
        (Shape("a", (0, 1), 0), Shape("b", (2, 3), 0)),
        (program("aa"), program("aa"), program("bb"), program("bb")),
        (Plan(1),),
        most_ahead=0,
        n_failures=1,
        n_repeats=0,
    ),
    "a world without a name": Bounds((Shape("w", (0, 1), 0),), alike(2, "www"), (TRIAL,), n_failures=1),
    "a rank cannot load the plan": Bounds((WORLD_2,), alike(2, "wwwwww"), (Plan(1), NEXT), refuses=(1, 1)),
    "rank 0 cannot load the plan": Bounds((WORLD_2,), alike(2, "wwwwww"), (Plan(1), NEXT), refuses=(0, 1)),
    "a rank issues other calls": Bounds(
        (Shape("w", (0, 1), 1, odd_from=10),), alike(2, "wwwww"), (Plan(1), Plan(2)), most_ahead=2, n_repeats=1
    ),
}
SLOW: dict[str, Bounds] = {
    "four ranks, two plans, a failure": Bounds(
        (WORLD_4,), alike(4, "wwww"), (TRIAL, NEXT), most_ahead=1, n_failures=1, n_repeats=0
    ),
    "three ranks, anything fails twice": Bounds((WORLD_3,), alike(3, "wwww"), (TRIAL,), n_failures=2, lead=1),
    "overlapping communicators, anything fails twice": Bounds(
        (Shape("a", (0, 1), 1), Shape("b", (1, 2), 2), Shape("c", (0, 2), 3)),
        (program("acac"), program("abab"), program("bcbc")),
        (TRIAL, NEXT),
        n_failures=2,
        n_repeats=1,
        most_ahead=1,
    ),
    "a part of the ranks that differ is missing": ODD_OF_THREE,
    "communicators without a name, two failures": Bounds(
        (Shape("a", (0, 1), 0), Shape("b", (2, 3), 0)),
        (program("aa"), program("aa"), program("bb"), program("bb")),
        (Plan(1),),
        most_ahead=1,
        n_failures=2,
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_every_interleaving(name: str) -> None:
    assert explore(Model(JOBS[name])) > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SLOW)
def test_every_interleaving_of_larger_jobs(name: str) -> None:
    assert explore(Model(SLOW[name])) > 10_000


@pytest.mark.parametrize(("mutant", "bounds"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_a_protocol_that_is_wrong_in_one_place_is_found(mutant: type[Model], bounds: Bounds) -> None:
    with pytest.raises(Violation):
        explore(mutant(bounds))
