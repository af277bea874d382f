"""How good predictions are where nothing was measured: sizes, rank counts and fabrics left out.

    python -m benchmarks prediction_held_out [--quick] [--json] [--store FILE] [--data DIR] [--generated N] [--grids N]
        [--only TEXT] [--by size range ranks cell channels fabric cost]

Every registered model is fitted to a noisy sweep (three calls per setting and size) without the part left out,
and asked for the best setting there. Per data set and model:

    regret_mean, regret_worst   chosen over best true time, minus 1, at the places left out
    bounded_regret_mean, _worst the same of the setting whose 90 % bound is least: the bound that trials have to keep
    careful_regret_mean, _worst the same if NCCL's own choice stays unless the gain exceeds its doubt (as replay does)
    nccl_regret_mean            the same of NCCL's own choice
    interval_coverage_90        share of left-out medians inside the model's 90 % interval

Beside the models stands what no smooth prediction can do better, from true times of *all* other sizes:

    interpolated_regret         the best setting after interpolating every setting between its two neighbouring sizes
    neighbours_regret           in hindsight the best of three: what wins below, what wins above, what wins interpolated

Held out by size: every sixth size class at a time. By range: the lower third of the sizes (`below`), then the
upper one (`above`). By cell: one algorithm and
protocol of one collective at a time, never measured, as baked arrays tell of it; chosen among all. By channels:
one channel count at a time, never measured with anything (`channels`), or not with one algorithm and protocol of one
collective (`channels_of_cell`: each with another count in turn); likewise. By ranks: one rank count at a time, of
fabrics, files or stores with several, as the model tells of it (`ranks`) and as the baked arrays of the others do
(`ranks_looked_up`: what the daemon has). By fabric: the model of all *other* fabrics, shipped ones or those of
`--store` and `--data`, beside NCCL's own choice (`nccl_regret_mean`); and what the daemon believes there before a job's
first step (`as_a_job_begins`: NCCL's cost, and the doubt about it) and once every key has made a call with NCCL's own
choice (`after_the_first_step`), on generated fabrics, too. Cost: seconds and memory
to fit 100,000 measurements in a fresh process, milliseconds to predict all candidates of 1,000 keys, and the
regret on a machine whose best channel counts lie in two peaks far apart. `--grids N` adds N small random grids and
N with isolated jumps (`generated_grids`), each group judged as one.
"""

from __future__ import annotations

import argparse
import math
import sys
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
    generated,
    of_folder,
    of_store,
    shipped,
    sweep_block,
)
from benchmarks.lib.data.generated_grids import generated_grids
from benchmarks.lib.reporting import Result, report
from benchmarks.modeling.prediction_cost import cost
from benchmarks.modeling.prediction_elsewhere import (
    TooFew,
    by_fabric,
    by_ranks,
    enough_fabrics,
    many_rank_counts,
    with_rank_counts,
    with_sizes,
)
from benchmarks.modeling.prediction_first_step import beginnings, on_average
from benchmarks.modeling.prediction_verdicts import judge, looked_up, summed_up, truth_of, verdicts
from benchmarks.policy.regret_policies import Problem
from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.cost_model import channels_used
from zerotune.store.records import BASELINE, Collective, CommunicatorClass, DecisionKey, Phase, Protocol
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.kriging import Kriging
from zerotune.tuner.modeling.correction.training_set import TrainingSet, build
from zerotune.tuner.modeling.features import DEFAULT_CELL, NO_CELL, CostPrior, Ints

N_FOLDS = 6
TWO_PEAKS = "two_peaks"
WAYS = ("size", "range", "ranks", "cell", "channels", "fabric", "cost")
Bools = npt.NDArray[np.bool_]


def by_size(name: str, group: Sequence[DataSet], models: Sequence[str]) -> Iterator[Result]:
    """Sizes that were not measured, between measured ones; a group is judged as one.

    Args:
        name: of the group.
        group: data sets, each with models of its own.
        models: names of those to judge.

    Yields:
        Figures by model.
    """
    found: list[Result] = []
    for data, points, classes in measured(group):
        n_folds = min(N_FOLDS, len(classes))
        for fold in range(n_folds):  # neighbours of a size left out stay in
            found += without(f"size:{name}", data, points, classes[fold::n_folds], models)
    yield from summed_up(found)
    yield from floors(name, group)


def by_range(name: str, group: Sequence[DataSet], models: Sequence[str]) -> Iterator[Result]:
    """Sizes below and above all that was measured.

    Args:
        name: of the group.
        group: data sets, each with models of its own.
        models: names of those to judge.

    Yields:
        Figures by model.
    """
    found: list[Result] = []
    for data, points, classes in measured(group):
        n_left_out = len(classes) // 3
        if n_left_out >= 2:
            found += without(f"below:{name}", data, points, classes[:n_left_out], models)
            found += without(f"above:{name}", data, points, classes[-n_left_out:], models)
    yield from summed_up(found)


def by_cell(name: str, group: Sequence[DataSet], models: Sequence[str]) -> Iterator[Result]:
    """An algorithm and protocol that one collective was never measured with, but others were.

    Args:
        name: of the group.
        group: data sets, each with models of its own.
        models: names of those to judge.

    Yields:
        Figures by model.
    """
    found: list[Result] = []
    for data, points, _ in measured(group):
        kinds = np.stack([points.collective, points.algorithm, points.protocol], axis=1)
        for kind in np.unique(kinds, axis=0):
            held = np.all(kinds == kind, axis=1)
            if (int(kind[1]), int(kind[2])) == DEFAULT_CELL:
                continue
            found += not_asked(f"cell:{name}", data, points, held, models)
    yield from summed_up(found)


def by_channels(name: str, group: Sequence[DataSet], models: Sequence[str]) -> Iterator[Result]:
    """A channel count that was never measured: anywhere, then with one algorithm and protocol of one collective.

    Args:
        name: of the group.
        group: data sets, each with models of its own.
        models: names of those to judge.

    Yields:
        Figures by model.
    """
    found: list[Result] = []
    for data, points, _ in measured(group):
        named = points.algorithm != DEFAULT_CELL[0]
        counts = np.unique(points.n_channels[named])
        if len(counts) < 3:
            continue
        for count in counts:
            held = named & (points.n_channels == count)
            found += not_asked(f"channels:{name}", data, points, held, models)
        kinds = np.stack([points.collective, points.algorithm, points.protocol], axis=1)
        for at, kind in enumerate(np.unique(kinds[named], axis=0)):  # each with another count
            here = np.all(kinds == kind, axis=1) & (points.n_channels == counts[at % len(counts)])
            found += not_asked(f"channels_of_cell:{name}", data, points, here, models)
    yield from summed_up(found)


def not_asked(name: str, data: DataSet, points: TrainingSet, held: Bools, models: Sequence[str]) -> Iterator[Result]:
    """Every model judged on settings that it has not seen; it chooses among all.

    Args:
        name: of the figures.
        data: the fabric's keys.
        points: what was measured.
        held: points to leave out, shape (n_points,).
        models: names of those to judge.

    Yields:
        Figures by model; none where too little is left.
    """
    left_out = held & ~ran_besides(points, held)
    if not left_out.any() or (~held).sum() < 4:
        return
    there = np.flatnonzero(np.isin(place_names(points), place_names(points)[held]))  # where they could be chosen
    train, test, judged = points.take(~held), points.take(there), np.flatnonzero(left_out[there])
    costs = CostPrior(data.facts)
    for model in models:
        opinion = looked_up(trainer.bake(Kriging().fit(train), train, costs), test, costs)
        yield from verdicts(f"{name}:{model}", test, opinion, judged, data.facts, truth_of(data.problems))


def ran_besides(points: TrainingSet, held: Bools) -> Bools:
    """Which points are, once NCCL has clamped their channels, one and the same thing as points not in `held`."""
    kinds = zip(points.collective.tolist(), points.protocol.tolist(), strict=True)
    sizes = np.round(2.0**points.log2_bytes).astype(np.int64).tolist()
    used = [
        channels_used(Collective(collective), Protocol(protocol), nbytes, n_channels) if protocol != NO_CELL else 0
        for (collective, protocol), nbytes, n_channels in zip(kinds, sizes, points.n_channels.tolist(), strict=True)
    ]
    columns = points.n_ranks, points.n_nodes, points.collective, points.algorithm, points.protocol, sizes, used
    names = np.unique(np.stack([np.asarray(one) for one in columns], axis=1), axis=0, return_inverse=True)[1]
    names = names.reshape(-1)
    besides: Bools = np.isin(names, names[~held])
    return besides


def place_names(points: TrainingSet) -> Ints:
    """A number for each communicator, collective and size."""
    table = np.stack([points.n_ranks, points.n_nodes, points.collective, points.size_class], axis=1)
    return np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)


def measured(group: Sequence[DataSet]) -> Iterator[tuple[DataSet, TrainingSet, Ints]]:
    """Every data set with the points of a sweep and their size classes."""
    for data in group:
        points = build(sweep_block(data.problems), CostPrior(data.facts))
        yield data, points, np.unique(points.size_class)


def without(name: str, data: DataSet, points: TrainingSet, classes: Ints, models: Sequence[str]) -> list[Result]:
    """Every model judged at size classes that it has not seen.

    Args:
        name: of the figures.
        data: the fabric's keys.
        points: what was measured.
        classes: size classes to leave out.
        models: names of those to judge.

    Returns:
        Figures by model; none where too little is left.
    """
    held = np.isin(points.size_class, classes)
    if (~held).sum() < 4:
        return []
    train, test, truth = points.take(~held), points.take(held), truth_of(data.problems)
    return [one for model in models for one in judge(name, model, train, test, data.facts, truth)]


def floors(name: str, group: Sequence[DataSet]) -> Iterator[Result]:
    """Regrets of choices that see the true times of all other sizes: what is left lies in the data."""
    interpolated, neighbours = [], []
    for data in group:
        between, beside = floor_regrets(data)
        interpolated += between
        neighbours += beside
    for kind, regrets in (("interpolated", interpolated), ("neighbours", neighbours)):
        if regrets:
            yield Result(f"{kind}_regret_mean@size:{name}", 100 * float(np.mean(regrets)), "%")
            yield Result(f"{kind}_regret_worst@size:{name}", 100 * max(regrets), "%")


def floor_regrets(data: DataSet) -> tuple[list[float], list[float]]:
    """Of interpolating, and of the best of three in hindsight."""
    interpolated, neighbours = [], []
    by_family: dict[tuple[CommunicatorClass, int], list[Problem]] = {}
    for problem in data.problems:
        by_family.setdefault((problem.key.communicator, int(problem.key.collective)), []).append(problem)
    for problems in by_family.values():
        times_us = [
            dict(zip(p.candidates, p.truth_us, strict=True)) for p in sorted(problems, key=lambda p: p.message_bytes)
        ]
        log_bytes = np.log(sorted(p.message_bytes for p in problems))
        for at, here in enumerate(times_us):
            others = [one for one in range(len(times_us)) if one != at]
            between = {}
            for candidate in here:
                known = [one for one in others if candidate in times_us[one]]
                if known:
                    log_us = np.log([times_us[one][candidate] for one in known])
                    between[candidate] = float(np.interp(log_bytes[at], log_bytes[known], log_us))
            beside = [times_us[one] for one in (at - 1, at + 1) if 0 <= one < len(times_us)]
            winners = [min(there.keys() & here.keys(), key=there.__getitem__, default=BASELINE) for there in beside]
            best_us = min(here.values())
            if between:
                guess = min(between, key=between.__getitem__)
                interpolated.append(here[guess] / best_us - 1)
                neighbours.append(min(here[one] for one in (guess, *winners) if one in here) / best_us - 1)
    return interpolated, neighbours


def two_peaks() -> Iterator[Result]:
    """Channels that are best at 2 and at 32, bad between: the far peak is a few percent better."""
    facts = fabric.load("h100_ib_2").describe()
    data = next(one for one in shipped(1.0) if one.name == "h100_ib_2")
    problems = []
    for problem in data.problems:
        truth = []
        for candidate, us in zip(problem.candidates, problem.truth_us, strict=True):
            n_channels = candidate.n_channels or problem.ran_by_default.n_channels
            octaves = min(abs(math.log2(n_channels / 2)), abs(math.log2(n_channels / 16)) + 0.1)
            truth.append(us * (1.0 + 0.25 * min(octaves, 1.5)))
        problems.append(replace(problem, truth_us=tuple(truth)))
    found = list(by_size(TWO_PEAKS, [DataSet(TWO_PEAKS, problems, facts)], [trainer.MODEL_NAME]))
    yield from found
    keys = [DecisionKey(p.key.communicator, p.key.collective, Phase.other, p.key.size_class) for p in problems]
    assert len(keys) == len(problems)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, the winner only; a minute, own sets apart")
    add_sources(parser, "store", "data", "generated", "only", "undescribed")
    parser.add_argument(
        "--grids", type=natural, default=0, metavar="N", help="judge on N small random grids of each kind"
    )
    parser.add_argument("--seed", type=natural, default=1000, help="first seed of what is generated")
    parser.add_argument("--by", nargs="+", choices=WAYS)
    arguments = parser.parse_args()
    check_sources(parser, arguments.store, arguments.data)

    def described(data: DataSet) -> DataSet:
        return as_undescribed(data) if arguments.undescribed else data

    own = list(of_store(arguments.store)) if arguments.store is not None else []
    own += of_folder(arguments.data) if arguments.data is not None else []
    own = [described(data) for data in own if arguments.only in data.name]
    own_by_ranks, own_by_fabric = elsewhere(parser, own, arguments.by)
    models = [trainer.MODEL_NAME]
    asked_for = arguments.by or WAYS
    n_per_octave = 0.5 if arguments.quick else 1.0
    seeds = range(arguments.seed, arguments.seed + arguments.generated)
    ours = [described(data) for data in shipped(n_per_octave) if arguments.only in data.name]
    drawn = [described(data) for data in generated(seeds, n_per_octave) if arguments.only in data.name]
    known = [*ours, *drawn, *own]
    groups = [(data.name, [data]) for data in known]
    grid_seeds = range(arguments.seed, arguments.seed + arguments.grids)
    for name, jumpy in (("small_grids", False), ("jumpy_grids", True)):
        if grid_seeds and arguments.only in name:
            groups.append((name, [DataSet(one, keys, {}) for one, keys in generated_grids(grid_seeds, jumpy=jumpy)]))
    results: list[Result] = []
    for name, group in groups:
        print(f"{name}: {sum(len(data.problems) for data in group)} keys", file=sys.stderr, flush=True)
        if "size" in asked_for:
            results += by_size(name, group, models)
        if "range" in asked_for:
            results += by_range(name, group, models)
        if "cell" in asked_for:
            results += by_cell(name, group, models)
        if "channels" in asked_for:
            results += by_channels(name, group, models)
    if "size" in asked_for and arguments.only in TWO_PEAKS:
        results += two_peaks()
    if "ranks" in asked_for:
        for data in [*map(described, many_rank_counts(n_per_octave, seeds)), *own_by_ranks]:
            if arguments.only in data.name:
                results += by_ranks(data, models)
    if "fabric" in asked_for:
        results += chain.from_iterable(map(beginnings, known))
        results += on_average(results)
        for data_sets in (ours, own_by_fabric):
            if len(data_sets) > 1:
                results += by_fabric(data_sets, models)
    if "cost" in asked_for:
        results += cost(10_000 if arguments.quick else 100_000)
    if not results:
        if groups:
            names = ", ".join(name for name, _ in groups)
            parser.error(f"--by {' '.join(asked_for)}: too little was measured to leave a part of it out; of {names}")
        parser.error(f"--only {arguments.only}: no data set's name holds that; leave --only out to see all names")
    report("prediction_held_out", results, as_json=arguments.json)


def elsewhere(
    parser: argparse.ArgumentParser, own: Sequence[DataSet], asked_for: Sequence[str] | None
) -> tuple[Sequence[DataSet], Sequence[DataSet]]:
    """Those of the user's data sets that can be judged by rank counts, and by fabrics.

    By size all can be: one with a single size just gives no figures.

    Args:
        parser: ends with a message (exit code 2) where there are too few for what the user has named.
        own: the user's data sets.
        asked_for: the ways that the user has named; None: all, and too few for one are only mentioned.

    Returns:
        By rank counts, and by fabrics.
    """
    found: dict[str, Sequence[DataSet]] = {"size": (), "ranks": (), "fabric": ()}
    for way, choose in (("size", with_sizes), ("ranks", with_rank_counts), ("fabric", enough_fabrics)):
        if asked_for is not None and way not in asked_for:
            continue
        try:
            found[way] = choose(own)
        except TooFew as why:
            if asked_for is not None:
                parser.error(str(why))
            print(why, file=sys.stderr)
    return found["ranks"], found["fabric"]


if __name__ == "__main__":
    main()
