"""How good predictions are where nothing was measured: sizes, rank counts and fabrics left out.

    python -m benchmarks prediction_held_out [--quick] [--json] [--store FILE] [--data DIR] [--generated N]
        [--only TEXT] [--by size range ranks cell channels fabric]

The model is fitted to a noisy sweep (three calls per setting and size) without the part left out, and asked for the
best setting there. Per data set:

    regret_mean, regret_worst   chosen over best true time, minus 1, at the places left out
    bounded_regret_mean, _worst the same of the setting whose 90 % bound is least: the bound that trials have to keep
    nccl_regret_mean            the same of NCCL's own choice
    interval_coverage_90        share of left-out medians inside the model's 90 % interval

Held out by size: every sixth size class at a time. By range: the lower third of the sizes (`below`), then the
upper one (`above`). By cell: one algorithm and protocol of one collective at a time, as baked arrays tell of it; chosen
among all. By channels: one channel count at a time, never measured with anything (`channels`), or not with one
algorithm and protocol of one collective (`channels_of_cell`: each with another count in turn). By ranks: one rank count
at a time, of fabrics, files or stores with several, as the model tells of it (`ranks`) and as the baked arrays of the
others do (`ranks_looked_up`: what the daemon has). By fabric: the model of all *other* fabrics, shipped ones or those
of `--store` and `--data`; and what the daemon believes there before a job's first step (`as_a_job_begins`: NCCL's cost,
and the doubt about it) and once every key has made a call with NCCL's own choice (`after_the_first_step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from benchmarks.lib.argument_types import natural
from benchmarks.lib.data.data_sets import (
    DataSet,
    add_sources,
    as_undescribed,
    check_sources,
    fabric_problems,
    generated,
    of_folder,
    of_store,
    shipped,
    sweep_block,
)
from benchmarks.lib.reporting import Result, options_of, report, say
from benchmarks.modeling.prediction_first_step import beginnings, on_average
from benchmarks.modeling.prediction_verdicts import looked_up, summed_up, verdicts
from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.cost_model import channels_used
from zerotune.store.records import Collective, Protocol
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import MAX_POINTS, TrainingSet, build
from zerotune.tuner.modeling.features import DEFAULT_CELL, NO_CELL, CostPrior

N_FOLDS = 6
MIN_POINTS = 4
WAYS = ("size", "range", "ranks", "cell", "channels", "fabric")
RANKS = (8, 16, 32, 64, 128)
MANY_NODES = ("ethernet_boxes", "h100_ib_16")
Bools = npt.NDArray[np.bool_]
Fold = tuple[str, Bools]
"""What the figures are called, and the points to leave out, shape (n_points,)."""


def by_size(points: TrainingSet) -> Iterator[Fold]:
    """Sizes that were not measured, between measured ones: neighbours of a size left out stay in."""
    classes = np.unique(points.size_class)
    n_folds = min(N_FOLDS, len(classes))
    for fold in range(n_folds):
        yield "size", np.isin(points.size_class, classes[fold::n_folds])


def by_range(points: TrainingSet) -> Iterator[Fold]:
    """Sizes below and above all that was measured."""
    classes = np.unique(points.size_class)
    if (n_left_out := len(classes) // 3) >= 2:
        yield "below", np.isin(points.size_class, classes[:n_left_out])
        yield "above", np.isin(points.size_class, classes[-n_left_out:])


def by_cell(points: TrainingSet) -> Iterator[Fold]:
    """An algorithm and protocol that one collective was never measured with, but others were."""
    kinds = np.stack([points.collective, points.algorithm, points.protocol], axis=1)
    for kind in np.unique(kinds, axis=0):
        if (int(kind[1]), int(kind[2])) != DEFAULT_CELL:
            yield "cell", np.all(kinds == kind, axis=1)


def by_channels(points: TrainingSet) -> Iterator[Fold]:
    """A channel count that was never measured: anywhere, then with one algorithm and protocol of one collective."""
    named = points.algorithm != DEFAULT_CELL[0]
    counts = np.unique(points.n_channels[named])
    if len(counts) < 3:
        return
    for count in counts:
        yield "channels", named & (points.n_channels == count)
    kinds = np.stack([points.collective, points.algorithm, points.protocol], axis=1)
    for at, kind in enumerate(np.unique(kinds[named], axis=0)):  # each with another count
        yield "channels_of_cell", np.all(kinds == kind, axis=1) & (points.n_channels == counts[at % len(counts)])


def by_ranks(points: TrainingSet) -> Iterator[Fold]:
    """A rank count that was never measured."""
    counts = np.unique(points.n_ranks)
    for n_ranks in counts if len(counts) > 1 else ():
        yield "ranks", points.n_ranks == n_ranks


OF_ONE_FABRIC = {"size": by_size, "range": by_range, "cell": by_cell, "channels": by_channels}


def without(data: DataSet, points: TrainingSet, folds: Iterator[Fold]) -> Iterator[Result]:
    """The model judged at what it has not seen."""
    found: list[Result] = []
    costs, places = CostPrior(data.facts), _place_names(points)
    for kind, held in folds:
        is_never_run = kind in ("cell", "channels", "channels_of_cell")  # they are chosen among what was measured there
        left_out = held & ~ran_besides(points, held) if is_never_run else held
        if not left_out.any() or (~held).sum() < MIN_POINTS:
            continue
        there = np.flatnonzero(np.isin(places, places[held]) if is_never_run else held)
        train, test, judged = points.take(~held), points.take(there), np.flatnonzero(left_out[there])
        fitted = Kriging().fit(train)
        if not is_never_run:
            found += verdicts(f"{kind}:{data.name}:{trainer.MODEL_NAME}", test, fitted.predict(test), judged, data)
        if is_never_run or kind == "ranks":
            name = "ranks_looked_up" if kind == "ranks" else kind
            baked = looked_up(trainer.bake(fitted, train, costs), test, costs)
            found += verdicts(f"{name}:{data.name}:{trainer.MODEL_NAME}", test, baked, judged, data)
    yield from summed_up(found)


def ran_besides(points: TrainingSet, held: Bools) -> Bools:
    """Which points are, once NCCL has clamped their channels, one and the same thing as points not in `held`."""
    kinds = zip(points.collective.tolist(), points.protocol.tolist(), strict=True)
    sizes = np.round(2.0**points.log2_bytes).astype(np.int64).tolist()
    used = [
        channels_used(Collective(collective), Protocol(protocol), nbytes, n_channels) if protocol != NO_CELL else 0
        for (collective, protocol), nbytes, n_channels in zip(kinds, sizes, points.n_channels.tolist(), strict=True)
    ]
    columns = points.n_ranks, points.n_nodes, points.collective, points.algorithm, points.protocol, sizes, used
    names = _numbered(*columns)
    besides: Bools = np.isin(names, names[~held])
    return besides


def _place_names(points: TrainingSet) -> npt.NDArray[np.int64]:
    """A number for each communicator, collective and size."""
    return _numbered(points.n_ranks, points.n_nodes, points.collective, points.size_class)


def _numbered(*columns: npt.ArrayLike) -> npt.NDArray[np.int64]:
    table = np.stack([np.asarray(one) for one in columns], axis=1)
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)


def many_rank_counts(n_per_octave: float) -> Iterator[DataSet]:
    """Shipped fabrics of many nodes, each measured on several rank counts."""
    for name in MANY_NODES:
        machine = fabric.load(name)
        facts = machine.describe()
        problems = (fabric_problems(machine, facts, n_per_octave=n_per_octave, n_ranks=n_ranks) for n_ranks in RANKS)
        yield DataSet(name, list(chain.from_iterable(problems)), facts)


def by_fabric(data_sets: Sequence[DataSet]) -> Iterator[Result]:
    """The model of all other fabrics, on one that it has never seen."""
    points = [build(sweep_block(data.problems), CostPrior(data.facts)) for data in data_sets]
    for at, data in enumerate(data_sets):
        others = joined([one for index, one in enumerate(points) if index != at], MAX_POINTS // (len(points) - 1))
        posterior, everywhere = Kriging().fit(others).predict(points[at]), np.arange(len(points[at]))
        name = f"fabric:{data.name}:{trainer.MODEL_NAME}"
        yield from summed_up(verdicts(name, points[at], posterior, everywhere, data))


def joined(parts: Sequence[TrainingSet], n_each: int) -> TrainingSet:
    """All points in one set, thinned out evenly."""
    thin = [part.take(np.unique(np.linspace(0, len(part) - 1, n_each).astype(np.int64))) for part in parts]
    first = thin[0]
    return replace(first, **{name: np.concatenate([getattr(part, name) for part in thin]) for name in vars(first)})


def main() -> None:
    parser = options_of(__doc__, quick="fewer sizes; a minute, own sets apart")
    add_sources(parser, "store", "data", "generated", "only", "undescribed")
    parser.add_argument("--seed", type=natural, default=1000, help="first seed of what is generated")
    parser.add_argument("--by", nargs="+", choices=WAYS, default=WAYS)
    arguments = parser.parse_args()
    check_sources(parser, arguments.store, arguments.data)

    def described(data_sets: Iterator[DataSet]) -> list[DataSet]:
        chosen = (data for data in data_sets if arguments.only in data.name)
        return [as_undescribed(data) if arguments.undescribed else data for data in chosen]

    own = described(of_store(arguments.store)) if arguments.store is not None else []
    own += described(of_folder(arguments.data)) if arguments.data is not None else []
    n_per_octave = 0.5 if arguments.quick else 1.0
    ours = described(shipped(n_per_octave))
    seeds = range(arguments.seed, arguments.seed + arguments.generated)
    known = [*ours, *described(generated(seeds, n_per_octave)), *own]
    results: list[Result] = []
    for data in known:
        say(f"{data.name}: {len(data.problems)} keys")
        points = build(sweep_block(data.problems), CostPrior(data.facts))
        for way, folds in OF_ONE_FABRIC.items():
            if way in arguments.by:
                results += without(data, points, folds(points))
    if "ranks" in arguments.by:
        for data in [*described(many_rank_counts(n_per_octave)), *own]:
            points = build(sweep_block(data.problems), CostPrior(data.facts))
            results += without(data, points, by_ranks(points))
    if "fabric" in arguments.by:
        results += chain.from_iterable(map(beginnings, known))
        results += on_average(results)
        for data_sets in (ours, own):
            if len(data_sets) > 1:
                results += by_fabric(data_sets)
    if not results:
        if known:
            names = ", ".join(data.name for data in known)
            parser.error(f"--by {' '.join(arguments.by)}: too little was measured to leave a part of it out: {names}")
        parser.error(f"--only {arguments.only}: no data set's name holds that; leave --only out to see all names")
    report("prediction_held_out", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
