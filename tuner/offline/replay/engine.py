"""Judges policies on a table of collectives: what each would have cost, and how well that is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec
import numpy as np

from zerotune.agent.nccl.cost_model import in_effect
from zerotune.store.records import BASELINE, Candidate
from zerotune.tuner.offline.replay.estimates import NORMAL_95, Estimate, Grade
from zerotune.tuner.offline.replay.online import Mixture
from zerotune.tuner.offline.replay.policies import Policy, PolicyContext
from zerotune.tuner.offline.replay.table import Shape


class ShapeVerdict(msgspec.Struct, frozen=True):
    """One policy on one shape; costs are None where there is no evidence."""

    policy: str
    collective: str
    phase: str
    message_bytes: int
    n_ranks: int
    n_nodes: int
    n_collectives: int
    setting: str
    baseline_us: float | None
    cost_us: float | None
    low_us: float | None
    high_us: float | None
    evidence: str
    n_samples: int
    n_channels: int
    """Channels that the setting would run on; 0 = NCCL's own count."""


class PolicyTotal(msgspec.Struct, frozen=True):
    """One policy over the part of the trace that can be judged; intervals are 95 %."""

    policy: str
    cost_us: float
    low_us: float
    high_us: float
    baseline_us: float
    """The baseline's cost of the same collectives."""
    gain_percent: float
    gain_low_percent: float
    gain_high_percent: float
    n_judged: int
    n_refused: int
    refused_share_percent: float
    """Share without evidence: of the logged communication time, or of the bytes where the trace has no times."""
    n_by_evidence: dict[str, int]


class _Doubt(NamedTuple):
    """By how much all predictions together may be too high and too low (95 %); large errors are not symmetric."""

    below_us: float = 0.0
    above_us: float = 0.0

    def more(self, count: int, cost: Estimate) -> _Doubt:
        """With `count` collectives of that cost."""
        return _Doubt(
            self.below_us + count * (cost.cost_us - cost.low_us), self.above_us + count * (cost.high_us - cost.cost_us)
        )


_NO_DOUBT: Final = _Doubt()


@dataclass
class _Sums:
    """Running totals of one policy: costs, and errors that do or do not cancel between shapes."""

    cost_us: float = 0.0
    baseline_us: float = 0.0
    own_variance: float = 0.0
    difference_variance: float = 0.0
    shared: _Doubt = _NO_DOUBT
    shared_difference: _Doubt = _NO_DOUBT

    def add(self, count: int, cost: Estimate, baseline: Estimate, is_same: bool) -> None:
        """Add a shape of `count` collectives. Predictions share their model's error: their errors add up linearly."""
        self.cost_us += count * cost.cost_us
        self.baseline_us += count * baseline.cost_us
        error_us = count * cost.cost_us * cost.error
        baseline_error_us = count * baseline.cost_us * baseline.error
        if cost.grade is Grade.predicted:
            self.shared = self.shared.more(count, cost)
            self.shared_difference = self.shared_difference if is_same else self.shared_difference.more(count, cost)
        else:
            self.own_variance += error_us**2
            if not is_same:
                self.difference_variance += error_us**2 + baseline_error_us**2


def judge(
    shapes: Sequence[Shape],
    counts: Sequence[int],
    logged_us: Sequence[float],
    policies: dict[str, Policy],
    context: PolicyContext,
) -> tuple[tuple[PolicyTotal, ...], tuple[ShapeVerdict, ...]]:
    """Judge every policy on every shape.

    Args:
        shapes: of the trace, shape (n_shapes,).
        counts: collectives of each shape, shape (n_shapes,).
        logged_us: their total time in the trace, shape (n_shapes,); all 0: the trace has no times.
        policies: by name.
        context: what policies may look at.

    Returns:
        The totals of each policy, and (policy by policy) its result on each shape.
    """
    weights = np.asarray(logged_us, np.float64)
    if not weights.any():
        weights = np.array([shape.message_bytes for shape in shapes], np.float64) * np.asarray(counts)
    totals, verdicts = [], []
    for name, policy in policies.items():
        sums = _Sums()
        n_refused, refused_weight = 0, 0.0
        n_by_evidence = {grade.name: 0 for grade in Grade}
        for at, shape in enumerate(shapes):
            candidate = policy(context, shape)
            baseline = context.estimates.estimate(shape, BASELINE)
            if isinstance(candidate, Mixture):
                candidate = candidate.simplified
            cost = _cost(context, shape, candidate)
            is_baseline = isinstance(candidate, Candidate) and candidate.is_baseline
            verdicts.append(_verdict(name, shape, counts[at], candidate, cost, baseline))
            if cost is None or baseline is None:
                n_refused += counts[at]
                refused_weight += float(weights[at])
                continue
            n_by_evidence[cost.grade.name] += counts[at]
            sums.add(counts[at], cost, baseline, is_baseline)
        refused_share = refused_weight / float(weights.sum()) if weights.sum() > 0 else 0.0
        n_all = int(sum(counts))
        totals.append(_total(name, sums, n_all - n_refused, n_refused, 100 * refused_share, n_by_evidence))
    return tuple(totals), tuple(verdicts)


def _cost(context: PolicyContext, shape: Shape, asked: Candidate | Mixture) -> Estimate | None:
    """Cost of a setting or mixture; a mixture has its parts' mean, their worst grade and the sum of their errors."""
    if isinstance(asked, Candidate):
        return context.estimates.estimate(shape, asked)
    parts = [(context.estimates.estimate(shape, candidate), share) for candidate, share in asked.shares]
    cost_us = error_us = 0.0
    grade, n_samples = Grade.measured_here, 0
    for found, share in parts:
        if found is None:
            return None
        cost_us += share * found.cost_us
        error_us += share * found.cost_us * found.error
        grade, n_samples = max(grade, found.grade), n_samples + found.n_samples
    return Estimate(cost_us, error_us / cost_us, grade, n_samples)


def _verdict(
    policy: str,
    shape: Shape,
    count: int,
    candidate: Candidate | Mixture,
    cost: Estimate | None,
    baseline: Estimate | None,
) -> ShapeVerdict:
    return ShapeVerdict(
        policy=policy,
        collective=shape.collective.name,
        phase=shape.phase.name,
        message_bytes=shape.message_bytes,
        n_ranks=shape.n_ranks,
        n_nodes=shape.n_nodes,
        n_collectives=count,
        setting=str(candidate),
        baseline_us=None if baseline is None else baseline.cost_us,
        cost_us=None if cost is None else cost.cost_us,
        low_us=None if cost is None else cost.low_us,
        high_us=None if cost is None else cost.high_us,
        evidence="none" if cost is None else cost.grade.name,
        n_samples=0 if cost is None else cost.n_samples,
        n_channels=_channels(shape, candidate),
    )


def _channels(shape: Shape, candidate: Candidate | Mixture) -> int:
    if isinstance(candidate, Mixture):
        return round(sum(share * _channels(shape, one) for one, share in candidate.shares))
    return in_effect(shape.collective, shape.message_bytes, candidate).n_channels


def _total(
    name: str, sums: _Sums, n_judged: int, n_refused: int, refused_percent: float, n_by_evidence: dict[str, int]
) -> PolicyTotal:
    half_us = NORMAL_95 * math.sqrt(sums.own_variance)
    half_difference_us = NORMAL_95 * math.sqrt(sums.difference_variance)
    saved_us = sums.baseline_us - sums.cost_us
    percent = 100 / sums.baseline_us if sums.baseline_us > 0 else 0.0
    return PolicyTotal(
        policy=name,
        cost_us=sums.cost_us,
        low_us=max(sums.cost_us - half_us - sums.shared.below_us, 0.0),
        high_us=sums.cost_us + half_us + sums.shared.above_us,
        baseline_us=sums.baseline_us,
        gain_percent=percent * saved_us,
        gain_low_percent=percent * (saved_us - half_difference_us - sums.shared_difference.above_us),
        gain_high_percent=percent * (saved_us + half_difference_us + sums.shared_difference.below_us),
        n_judged=n_judged,
        n_refused=n_refused,
        refused_share_percent=refused_percent,
        n_by_evidence=n_by_evidence,
    )
