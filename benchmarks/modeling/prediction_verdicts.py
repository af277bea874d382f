"""What a model's opinion of some points is worth: regrets of the choices that follow from it, and coverage.

Part of `prediction_held_out`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from benchmarks.lib.data.data_sets import DataSet
from benchmarks.lib.reporting import Result
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.baked import Baked
from zerotune.tuner.modeling.correction.training_set import TrainingSet, candidate_at
from zerotune.tuner.modeling.features import CostPrior, Floats, Ints

Z_90 = 1.645
RISK_QUANTILE = 1.3


def places(points: TrainingSet) -> Iterator[tuple[CommunicatorClass, int, int, Ints]]:
    """(communicator, collective, bytes, rows) of each place with points."""
    nbytes = np.round(2.0**points.log2_bytes).astype(np.int64)
    table = np.stack([points.n_ranks, points.n_nodes, points.collective, nbytes], axis=1)
    names, inverse = np.unique(table, axis=0, return_inverse=True)
    for at, (n_ranks, n_nodes, collective, size) in enumerate(names.tolist()):
        yield CommunicatorClass(n_ranks, n_nodes), collective, size, np.flatnonzero(inverse.reshape(-1) == at)


def asked(points: TrainingSet, row: int, known: Collection[Candidate]) -> Candidate:
    """The candidate that was measured at a point; without channels if that count itself has no true time."""
    found = candidate_at(int(points.algorithm[row]), int(points.protocol[row]), int(points.n_channels[row]))
    if found is None or found in known:
        return found or BASELINE
    return Candidate(found.algorithm, found.protocol, 0)


def verdicts(
    name: str, test: TrainingSet, opinion: tuple[Floats, Floats], left_out: Ints, data: DataSet
) -> list[Result]:
    """Regrets of a model's choices, and whether its intervals hold what was measured."""
    truth = {
        (p.key.communicator, int(p.key.collective), p.message_bytes): dict(zip(p.candidates, p.truth_us, strict=True))
        for p in data.problems
    }
    costs = CostPrior(data.facts)
    mean, std = opinion
    inside = np.abs(test.residual - mean) <= Z_90 * np.hypot(std, test.noise)
    found = [Result(name, one, "inside") for one in inside[left_out].tolist()]
    for place, collective, nbytes, rows in places(test):
        known = truth.get((place, collective, nbytes), {})
        options = [asked(test, row, known) for row in rows]
        true = [known.get(one, math.nan) for one in options]
        if BASELINE not in options or np.isnan(true).any():
            continue
        predicted = mean[rows] + costs.log_cost(place, Collective(collective), options, nbytes)[0]
        chosen = {
            "regret": int(np.argmin(predicted)),
            "bounded": int(np.argmin(predicted + RISK_QUANTILE * std[rows])),
            "nccl": options.index(BASELINE),
        }
        found += [Result(name, true[at] / min(true) - 1, kind) for kind, at in chosen.items()]
    return found


def summed_up(found: Sequence[Result]) -> Iterator[Result]:
    """Mean and worst regret, and coverage, by name."""
    for name in dict.fromkeys(one.metric for one in found):
        values = {
            kind: [100 * one.value for one in found if one.metric == name and one.unit == kind]
            for kind in ("regret", "bounded", "nccl", "inside")
        }
        wins = name.endswith(trainer.MODEL_NAME)
        aimed = wins and name.startswith("size:")
        if values["regret"]:
            yield Result(f"regret_mean@{name}", float(np.mean(values["regret"])), "%", "<= 2" if aimed else "")
            yield Result(f"regret_worst@{name}", max(values["regret"]), "%", "<= 10" if aimed else "")
            yield Result(f"bounded_regret_mean@{name}", float(np.mean(values["bounded"])), "%")
            yield Result(f"bounded_regret_worst@{name}", max(values["bounded"]), "%")
            yield Result(f"nccl_regret_mean@{name}", float(np.mean(values["nccl"])), "%")
        if values["inside"]:
            coverage = float(np.mean(values["inside"]))
            yield Result(f"interval_coverage_90@{name}", coverage, "%", "85 to 95" if wins else "")


def looked_up(baked: Baked, points: TrainingSet, costs: CostPrior) -> tuple[Floats, Floats]:
    """What the daemon would believe of every point: mean and standard deviation (log), each shape (n_points,)."""
    mean, std = np.zeros(len(points)), np.zeros(len(points))
    classes, known = points.size_class, Knowledge((), baked)
    for place, collective, nbytes, rows in places(points):
        settings = zip(points.algorithm[rows], points.protocol[rows], points.n_channels[rows], strict=True)
        options = [candidate_at(int(a), int(p), int(n)) or BASELINE for a, p, n in settings]
        asked = place, Collective(collective), options, np.array([float(nbytes)])
        found = known.guess(*asked, classes[rows[:1]], costs)
        mean[rows] = found[0][0] - costs.log_cost(*asked, described_only=True)[0]
        std[rows] = found[1][0]
    return mean, std
