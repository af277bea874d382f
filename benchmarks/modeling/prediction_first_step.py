"""What a job believes of a fabric never measured, before its first step and after it. Part of `prediction_held_out`.

Nothing is ever decided before NCCL's own choice has run: a decision key is made by its first call. So what a job
believes after one call per key is what its first trials are judged by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.lib.data.data_sets import DataSet, Measured, sweep_block
from benchmarks.lib.reporting import Result
from benchmarks.modeling.prediction_verdicts import places, summed_up, truth_of, verdicts
from zerotune.store.records import BASELINE, Collective
from zerotune.tuner.learning.policy.change_detection import Regimes
from zerotune.tuner.learning.policy.keys import CandidateTables, KeyTable
from zerotune.tuner.learning.policy.surrogate import Surrogate
from zerotune.tuner.modeling.correction.baked import UNKNOWN_STD
from zerotune.tuner.modeling.correction.training_set import TrainingSet, build
from zerotune.tuner.modeling.features import CostPrior, Floats

Z_90 = 1.645
COVERAGE, AIM = "interval_coverage_90@", "85 to 95"
BEGINS, AFTER = "as_a_job_begins", "after_the_first_step"


def beginnings(data: DataSet) -> Iterator[Result]:
    """Of one fabric: coverage of all settings before the first step, and of those not yet tried after it."""
    points = build(sweep_block(data.problems), CostPrior(data.facts))
    last_posterior, everywhere = as_a_job_begins(points, CostPrior(data.facts)), np.arange(len(points))
    name = f"fabric:{data.name}:{BEGINS}"
    yield from summed_up(verdicts(name, points, last_posterior, everywhere, data.facts, truth_of(data.problems)))
    scores = after_the_first_step(data)
    if len(scores):
        name = f"fabric:{data.name}:{AFTER}"
        yield Result(f"{COVERAGE}{name}", 100 * float(np.mean(np.abs(scores) <= Z_90)), "%", AIM)
        yield Result(f"slower_than_interval@{name}", 100 * float(np.mean(scores > Z_90)), "%")


def on_average(found: Sequence[Result]) -> Iterator[Result]:
    """Coverages among `found`, the mean over fabrics: errors of a cell are alike, so one fabric says little."""
    for when in (BEGINS, AFTER):
        of_each = [one.value for one in found if one.metric.startswith(COVERAGE) and one.metric.endswith(f":{when}")]
        if len(of_each) > 1:
            yield Result(f"mean_of_{len(of_each)}:{COVERAGE}fabric:{when}", float(np.mean(of_each)), "%", AIM)


def as_a_job_begins(points: TrainingSet, costs: CostPrior) -> tuple[Floats, Floats]:
    """What the daemon believes on a fabric never measured: NCCL's cost, with all the doubt about it."""
    tables, doubt = CandidateTables(costs), np.zeros(len(points))
    for place, collective, _, rows in places(points):
        doubt[rows] = np.hypot(UNKNOWN_STD, tables.family((place, Collective(collective))).doubt_in_common)
    return np.zeros(len(points)), doubt


def after_the_first_step(data: DataSet) -> Floats:
    """By how many of its standard deviations each setting that was not tried is slower than the posterior says, once
    every key has made one call with NCCL's own choice.
    """
    surrogate = Surrogate(CandidateTables(Measured(data.facts, data.problems)), Regimes())
    evidence = surrogate.evidence
    keys = KeyTable(surrogate.tables)
    block = sweep_block(data.problems, n_each=1)
    block = block[block["is_default"] > 0]
    called = keys.indices(block)
    keys.learn_defaults(block, called)
    slots = np.array([evidence.slot(key, BASELINE) for key in called.tolist()])
    evidence.add(evidence.calls(slots, keys.logs(block, called)), np.zeros(len(block), np.int64))
    problems, scores = {problem.key: problem for problem in data.problems}, []
    for state in keys.states:
        problem = problems[state.key]
        true_us = dict(zip(problem.candidates, problem.truth_us, strict=True))
        mean, std = surrogate.posterior(state)
        for at, option in enumerate(surrogate.tables.of(state).options):
            if not option.is_baseline and option in true_us and math.isfinite(mean[at]):
                scores.append((math.log(true_us[option]) - float(mean[at])) / float(std[at]))
    return np.array(scores)
