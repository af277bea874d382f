"""The policies that replay can judge: each names a setting for every shape of the trace.

A policy is a function of a `PolicyContext` and a shape; `POLICIES` has all of them by name. Policies see what a live one
would: the oracle alone looks at this trace's durations, and at what the others name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from zerotune.agent.nccl.cost_model import in_effect
from zerotune.agent.nccl.fabric import Fabric
from zerotune.store.errors import UserError
from zerotune.store.records import BASELINE, Candidate, PlanRow
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.offline.replay.estimates import CostEstimates, Estimate, Grade
from zerotune.tuner.offline.replay.legality import fits
from zerotune.tuner.offline.replay.online import Mixture, lowest_bound, lowest_draw, play_bandit, play_tuner
from zerotune.tuner.offline.replay.table import Shape

DOUBT_Z: Final = 1.0
"""The model's gain must exceed this many of its own standard deviations before its setting is taken."""
MIN_GAIN: Final = 0.01


@dataclass(frozen=True)
class PolicyContext:
    """What policies may look at."""

    estimates: CostEstimates
    knowledge: Knowledge = field(default_factory=Knowledge)
    """What was learned from other jobs on this fabric."""
    costs: CostPrior | None = None
    """NCCL's own cost; None when nobody described the fabric."""
    plan: Sequence[PlanRow] | None = None
    """A static table given by the user."""
    counts: Mapping[Shape, int] = field(default_factory=dict)
    """Calls of each shape."""
    n_steps: int = 0
    step_us: float | None = None
    """Length of the logged steps."""
    facts: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """The fabric's description in the trace."""
    fabric: Fabric | None = None
    """The fabric itself; None when nobody described it."""

    @cached_property
    def tuned(self) -> Mapping[Shape, Mixture]:
        """The settings that our own tuner would have run; computed once."""
        counts = {shape: count for shape, count in self.counts.items() if fits(self.fabric, shape.communicator)}
        return play_tuner(self.estimates, counts, self.n_steps, self.step_us, self.facts)


def baseline(context: PolicyContext, shape: Shape) -> Candidate:
    """Leave NCCL alone."""
    del context, shape
    return BASELINE


def table(context: PolicyContext, shape: Shape) -> Candidate:
    """A static table: the plan given, else the setting that earlier runs showed to beat the baseline."""
    if context.plan is None:
        decided = context.knowledge.decided(shape.key)
        return decided[0] if decided is not None and context.estimates.may_run(shape, decided[0]) else BASELINE
    for row in context.plan:
        if row.holds_for(shape.communicator, shape.collective, shape.phase, shape.message_bytes):
            return row.candidate
    return BASELINE


def model(context: PolicyContext, shape: Shape) -> Candidate:
    """The setting predicted cheapest before this job measured anything, if its gain exceeds its doubt."""
    if context.costs is None or not fits(context.fabric, shape.communicator):
        return BASELINE
    candidates = _offered(context, context.costs, shape)
    mean, std = context.knowledge.prior(shape.key, shape.message_bytes, candidates, context.costs)
    mean = np.where(np.isfinite(mean), mean, np.inf)
    at_baseline = candidates.index(BASELINE)
    gain = mean[at_baseline] - mean
    sure = gain > np.maximum(DOUBT_Z * std, MIN_GAIN)
    sure[at_baseline] = True
    return candidates[int(np.argmin(np.where(sure, mean, np.inf)))]


def _offered(context: PolicyContext, costs: CostPrior, shape: Shape) -> tuple[Candidate, ...]:
    """What the job may run, the baseline first; of channel counts with the same effect, the least."""
    found: dict[Candidate, Candidate] = {}
    for candidate in costs.candidates(shape.communicator, shape.collective):
        if context.estimates.may_run(shape, candidate):
            found.setdefault(in_effect(shape.collective, shape.message_bytes, candidate), candidate)
    return tuple(found.values())


def oracle(context: PolicyContext, shape: Shape) -> Candidate:
    """The best in hindsight of all measured settings and of what `table` and `model` name.

    A prediction counts by the high end of its interval. With few samples, chance makes the gain look too large.
    """
    return min(_judged(context, shape), key=lambda one: one[0], default=(0.0, BASELINE))[1]


def has_others(context: PolicyContext, shape: Shape) -> bool:
    """Whether the oracle knows a cost of any setting but NCCL's own choice."""
    judged = _judged(context, shape)
    # What NCCL chose is known under its own name, too, by the very same calls.
    own = {cost_us for cost_us, candidate in judged if candidate.is_baseline}
    return any(cost_us not in own for cost_us, _ in judged)


def _judged(context: PolicyContext, shape: Shape) -> list[tuple[float, Candidate]]:
    """(cost, setting) of all that have a cost; of predictions the high end of the interval."""
    known = [BASELINE, *context.estimates.measured_candidates(shape), table(context, shape), model(context, shape)]
    return [
        (_sure_us(estimate, candidate), candidate)
        for candidate in known
        if (estimate := context.estimates.estimate(shape, candidate))
    ]


def _sure_us(estimate: Estimate, candidate: Candidate) -> float:
    is_guess = estimate.grade is Grade.predicted and not candidate.is_baseline
    return estimate.high_us if is_guess else estimate.cost_us


def nearest(context: PolicyContext, shape: Shape) -> Candidate:
    """What won at the nearest size that earlier runs measured: a sweep's table, used between its sizes."""
    return context.estimates.nearest_winner(shape) or BASELINE


def ucb(context: PolicyContext, shape: Shape) -> Mixture:
    """A bandit per shape with confidence bounds; exploring is part of its cost."""
    return play_bandit(lowest_bound, context.estimates, shape, context.counts.get(shape, 1))


def thompson(context: PolicyContext, shape: Shape) -> Mixture:
    """A bandit per shape with posterior draws; exploring is part of its cost."""
    return play_bandit(lowest_draw, context.estimates, shape, context.counts.get(shape, 1))


def tuner(context: PolicyContext, shape: Shape) -> Mixture:
    """Our own tuner, started without knowledge of earlier runs; exploring is part of its cost."""
    return context.tuned.get(shape, Mixture(((BASELINE, 1.0),)))


Policy = Callable[[PolicyContext, Shape], Candidate | Mixture]
POLICIES: Final[Mapping[str, Policy]] = {
    policy.__name__: policy for policy in (baseline, table, model, oracle, nearest, ucb, thompson, tuner)
}
DEFAULT_POLICIES: Final = ("baseline", "table", "model", "oracle")


def named(names: Sequence[str]) -> dict[str, Policy]:
    """The policies called `names`, in that order.

    Raises:
        UserError: a name is none of POLICIES.
    """
    for name in names:
        if name not in POLICIES:
            raise UserError(f"there is no policy {name!r}", f"use one of {', '.join(POLICIES)}")
    return {name: POLICIES[name] for name in names}
