"""Predictions for rank counts and fabrics that were never measured. Part of `prediction_held_out`.

Also which of the user's data sets have enough to leave a part of it out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.lib.data.data_sets import DataSet, Facts, fabric_problems, generated_fabric, sweep_block
from benchmarks.lib.data.generated_fabrics import Surface
from benchmarks.lib.reporting import Result
from benchmarks.modeling.prediction_verdicts import judge, looked_up, summed_up, truth_of, verdicts
from zerotune.agent.nccl import fabric
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import MAX_POINTS, TrainingSet, build
from zerotune.tuner.modeling.features import CostPrior

RANKS = (8, 16, 32, 64, 128)
MANY_NODES = ("ethernet_boxes", "h100_ib_16")
FEW_RANKS = (2, 4, 8, 16)
"""Of fabrics that have no more than sixteen."""


class TooFew(Exception):
    """What was named cannot be judged in this way; the message says why."""


def many_rank_counts(n_per_octave: float, seeds: Sequence[int]) -> Iterator[DataSet]:
    """Shipped fabrics of many nodes and random variations of them, each measured on several rank counts."""
    for name in MANY_NODES:
        machine = fabric.load(name)
        yield at_rank_counts(name, machine, machine.describe(), n_per_octave)
    for seed in seeds:
        machine, facts = generated_fabric(seed, MANY_NODES[seed % len(MANY_NODES)])
        yield at_rank_counts(f"generated_{seed}", machine, facts, n_per_octave, Surface(seed))


def at_rank_counts(
    name: str, machine: fabric.Fabric, facts: Facts, n_per_octave: float, surface: Surface | None = None
) -> DataSet:
    """Keys of one fabric on every rank count of `RANKS`, or on few where it is small.

    Args:
        name: of the data set.
        machine: the fabric.
        facts: what is told of it.
        n_per_octave: sizes per doubling.
        surface: makes the truth bend; None: as the fabric's file says.

    Returns:
        One data set.
    """
    counts = RANKS if machine.max_ranks >= RANKS[-1] else [n for n in FEW_RANKS if n <= machine.max_ranks]
    return DataSet(
        name,
        [
            problem
            for n_ranks in counts
            for problem in fabric_problems(machine, facts, n_per_octave=n_per_octave, n_ranks=n_ranks, surface=surface)
        ],
        facts,
    )


def rank_counts(data: DataSet) -> list[int]:
    """Every rank count that a data set has keys of."""
    return sorted({problem.key.communicator.n_ranks for problem in data.problems})


def with_rank_counts(own: Sequence[DataSet], what: str = "--by ranks") -> list[DataSet]:
    """Those of `own` with several rank counts, for `what` leaves one out.

    Raises:
        TooFew: none has.
    """
    found = [data for data in own if len(rank_counts(data)) > 1]
    if own and not found:
        counts = ", ".join(f"{data.name} with {rank_counts(data)[0]} ranks" for data in own)
        raise TooFew(
            f"{what} leaves one rank count out and needs two at least in one fabric or file; there is {counts}"
        )
    for data in own:
        if len(rank_counts(data)) < 2:
            print(f"{data.name}: left out of {what}, it has {rank_counts(data)[0]} ranks only", file=sys.stderr)
    return found


def by_ranks(data: DataSet, models: Sequence[str]) -> Iterator[Result]:
    """A rank count that was never measured: as the model tells of it, and as baked arrays of the others do."""
    costs = CostPrior(data.facts)
    points = build(sweep_block(data.problems), costs)
    truth = truth_of(data.problems)
    found: list[Result] = []
    for n_ranks in rank_counts(data):
        held = points.n_ranks == n_ranks
        train, test = points.take(~held), points.take(held)
        for model in models:
            fitted = Kriging().fit(train)
            baked = looked_up(trainer.bake(fitted, train, costs), test, costs)
            for kind, opinion in (("ranks", fitted.predict(test)), ("ranks_looked_up", baked)):
                everywhere = np.arange(len(test))
                found += verdicts(f"{kind}:{data.name}:{model}", test, opinion, everywhere, data.facts, truth)
    yield from summed_up(found)


def with_sizes(own: Sequence[DataSet]) -> list[DataSet]:
    """Those of `own` with several sizes.

    Raises:
        TooFew: none has.
    """
    single = [data.name for data in own if len({problem.key.size_class for problem in data.problems}) == 1]
    if single and len(single) == len(own):
        raise TooFew(f"--by size leaves sizes out and needs two at least; {', '.join(single)}: one size only")
    for name in single:
        print(f"{name}: left out of --by size, it has one size only", file=sys.stderr)
    return [data for data in own if data.name not in single]


def enough_fabrics(own: Sequence[DataSet]) -> Sequence[DataSet]:
    """`own`, if one can be left out.

    Raises:
        TooFew: there is one only.
    """
    if len(own) == 1:
        raise TooFew(f"--by fabric leaves one fabric or file out and needs two at least; there is {own[0].name} only")
    return own


def by_fabric(data_sets: Sequence[DataSet], models: Sequence[str]) -> Iterator[Result]:
    """The model of all other fabrics, on one that it has never seen."""
    points = [build(sweep_block(data.problems), CostPrior(data.facts)) for data in data_sets]
    for at, data in enumerate(data_sets):
        others = joined([one for index, one in enumerate(points) if index != at], MAX_POINTS // (len(points) - 1))
        for model in models:
            found = judge(f"fabric:{data.name}", model, others, points[at], data.facts, truth_of(data.problems))
            yield from summed_up(found)


def joined(parts: Sequence[TrainingSet], n_each: int) -> TrainingSet:
    """All points in one set, thinned out evenly."""
    thin = [part.take(np.unique(np.linspace(0, len(part) - 1, n_each).astype(np.int64))) for part in parts]
    first = thin[0]
    return replace(first, **{name: np.concatenate([getattr(part, name) for part in thin]) for name in vars(first)})
