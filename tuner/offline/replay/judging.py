"""Judges policies: their costs with intervals, and cases in which the oracle is not the cheapest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ....agent.nccl.cost_model import in_effect
from ....store.records import BASELINE, Candidate
from .medians import NORMAL_95, Estimate, Grade
from .policies import Mixture, Policy, PolicyContext, has_others
from .result import CheaperPolicy, OracleFacts, PolicyTotal, ShapeVerdict
from .table import Shape

ORACLE: Final = "oracle"
LEAST_PERCENT: Final = 0.05
"""A policy that is better by less than this counts as equally good."""


class Judged(NamedTuple):
    """One policy's total, and its result on each shape."""

    total: PolicyTotal
    by_shape: dict[Shape, ShapeVerdict]


@dataclass
class _Sums:
    """Running totals of one policy: costs, and errors that do or do not cancel between shapes.

    Predictions share their model's error, so their errors add up linearly. Upper and lower errors have separate sums,
    as large ones are not symmetric.
    """

    cost_us: float = 0.0
    baseline_us: float = 0.0
    own_variance: float = 0.0
    difference_variance: float = 0.0
    below_us: float = 0.0
    above_us: float = 0.0
    difference_below_us: float = 0.0
    difference_above_us: float = 0.0

    def add(self, count: int, cost: Estimate, baseline: Estimate, is_same: bool) -> None:
        """Add a shape of `count` collectives; `is_same`: the policy's setting is the baseline's."""
        self.cost_us += count * cost.cost_us
        self.baseline_us += count * baseline.cost_us
        if cost.grade is Grade.predicted:
            below_us, above_us = count * (cost.cost_us - cost.low_us), count * (cost.high_us - cost.cost_us)
            self.below_us += below_us
            self.above_us += above_us
            if not is_same:
                self.difference_below_us += below_us
                self.difference_above_us += above_us
        else:
            variance = (count * cost.cost_us * cost.error) ** 2
            self.own_variance += variance
            if not is_same:
                self.difference_variance += variance + (count * baseline.cost_us * baseline.error) ** 2

    def total(self, policy: str, refused_percent: float, n_by_evidence: dict[str, int], n_refused: int) -> PolicyTotal:
        """The policy's total, with intervals."""
        half_us = NORMAL_95 * math.sqrt(self.own_variance)
        half_difference_us = NORMAL_95 * math.sqrt(self.difference_variance)
        saved_us = self.baseline_us - self.cost_us
        percent = 100 / self.baseline_us if self.baseline_us > 0 else 0.0
        return PolicyTotal(
            policy=policy,
            cost_us=self.cost_us,
            low_us=max(self.cost_us - half_us - self.below_us, 0.0),
            high_us=self.cost_us + half_us + self.above_us,
            baseline_us=self.baseline_us,
            gain_percent=percent * saved_us,
            gain_low_percent=percent * (saved_us - half_difference_us - self.difference_above_us),
            gain_high_percent=percent * (saved_us + half_difference_us + self.difference_below_us),
            n_judged=sum(n_by_evidence.values()),
            n_refused=n_refused,
            refused_share_percent=refused_percent,
            n_by_evidence=n_by_evidence,
        )


def judge(
    counts: Mapping[Shape, int], logged_us: Sequence[float], policies: Mapping[str, Policy], context: PolicyContext
) -> list[Judged]:
    """Judge every policy on every shape.

    `logged_us` has each shape's total time, shape (n_shapes,); all 0: the trace has no times.
    """
    weights = list(logged_us)
    if not any(weights):
        weights = [float(shape.message_bytes * count) for shape, count in counts.items()]
    return [_judged(name, policy, counts, weights, context) for name, policy in policies.items()]


def _judged(
    name: str, policy: Policy, counts: Mapping[Shape, int], weights: Sequence[float], context: PolicyContext
) -> Judged:
    sums, verdicts = _Sums(), {}
    n_refused, refused_weight = 0, 0.0
    n_by_evidence = {grade.name: 0 for grade in Grade}
    for (shape, count), weight in zip(counts.items(), weights, strict=True):
        asked = policy(context, shape)
        if isinstance(asked, Mixture):
            asked = asked.simplified
        cost, baseline = _cost(context, shape, asked), context.estimates.estimate(shape, BASELINE)
        verdicts[shape] = _verdict(name, shape, count, asked, cost, baseline)
        if cost is None or baseline is None:
            n_refused += count
            refused_weight += weight
        else:
            n_by_evidence[cost.grade.name] += count
            sums.add(count, cost, baseline, isinstance(asked, Candidate) and asked.is_baseline)
    refused_percent = 100 * (refused_weight / sum(weights)) if sum(weights) > 0 else 0.0
    return Judged(sums.total(name, refused_percent, n_by_evidence, n_refused), verdicts)


def _cost(context: PolicyContext, shape: Shape, asked: Candidate | Mixture) -> Estimate | None:
    """Cost of a setting or mixture; a mixture has its parts' mean cost, worst grade and summed errors."""
    if isinstance(asked, Candidate):
        return context.estimates.estimate(shape, asked)
    cost_us = error_us = 0.0
    grade, n_samples = Grade.measured_here, 0
    for candidate, share in asked.shares:
        found = context.estimates.estimate(shape, candidate)
        if found is None:
            return None
        cost_us += share * found.cost_us
        error_us += share * found.cost_us * found.error
        grade, n_samples = max(grade, found.grade), n_samples + found.n_samples
    return Estimate(cost_us, error_us / cost_us, grade, n_samples)


def _verdict(
    policy: str, shape: Shape, count: int, asked: Candidate | Mixture, cost: Estimate | None, baseline: Estimate | None
) -> ShapeVerdict:
    return ShapeVerdict(
        policy=policy,
        collective=shape.collective.name,
        phase=shape.phase.name,
        message_bytes=shape.message_bytes,
        n_ranks=shape.n_ranks,
        n_nodes=shape.n_nodes,
        n_collectives=count,
        setting=str(asked),
        baseline_us=None if baseline is None else baseline.cost_us,
        cost_us=None if cost is None else cost.cost_us,
        low_us=None if cost is None else cost.low_us,
        high_us=None if cost is None else cost.high_us,
        evidence="none" if cost is None else cost.grade.name,
        n_samples=0 if cost is None else cost.n_samples,
        n_channels=_channels(shape, asked),
    )


def _channels(shape: Shape, asked: Candidate | Mixture) -> int:
    if isinstance(asked, Mixture):
        return round(sum(share * _channels(shape, one) for one, share in asked.shares))
    return in_effect(shape.collective, shape.message_bytes, asked).n_channels


def oracle_facts(judged: Sequence[Judged], context: PolicyContext) -> OracleFacts | None:
    """Cases in which the oracle saves less than expected, with reasons; None: it was not requested."""
    oracle = next((one.by_shape for one in judged if one.total.policy == ORACLE), None)
    if oracle is None:
        return None
    alone = [one for shape, one in oracle.items() if one.is_judged and not has_others(context, shape)]
    cheaper = [_cheaper(one.total.policy, oracle, one.by_shape) for one in judged if one.total.policy != ORACLE]
    return OracleFacts(
        n_collectives=sum(one.n_collectives for one in oracle.values()),
        n_alone=sum(one.n_collectives for one in alone),
        n_refused=sum(one.n_collectives for one in oracle.values() if not one.is_judged),
        cheaper=tuple(one for one in cheaper if one is not None),
    )


def _cheaper(
    policy: str, oracle: Mapping[Shape, ShapeVerdict], other: Mapping[Shape, ShapeVerdict]
) -> CheaperPolicy | None:
    oracle_us = their_us = 0.0
    n_by_evidence: dict[str, int] = {}
    for shape, best in oracle.items():
        one = other[shape]
        if best.cost_us is None or one.cost_us is None:
            continue
        oracle_us += best.n_collectives * best.cost_us
        their_us += one.n_collectives * one.cost_us
        if one.cost_us < best.cost_us:
            n_by_evidence[one.evidence] = n_by_evidence.get(one.evidence, 0) + one.n_collectives
    below_percent = 100 * (1 - their_us / oracle_us) if oracle_us else 0.0
    if below_percent < LEAST_PERCENT:
        return None
    return CheaperPolicy(policy, below_percent, sum(n_by_evidence.values()), n_by_evidence)
