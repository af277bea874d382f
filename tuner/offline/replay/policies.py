"""The policies that replay can judge: each names a setting for every shape of the trace.

A policy is a function of a `PolicyContext` and a shape; `POLICIES` has them by name. Policies see only data that a live
policy would see. Only the oracle sees this trace's durations and the other policies' settings.

A policy that learns while it runs names a *mixture*: how often each setting would have run in as many calls as the
trace has. A call draws its duration from the evidence on its shape and setting. Settings without evidence do not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from ....agent.nccl.cost_model import in_effect
from ....agent.nccl.fabric_model import Fabric
from ....store.errors import UserError
from ....store.records import (
    BASELINE,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Plan,
    PlanRow,
    StepRecord,
    TimingSource,
    size_class,
)
from ....store.sqlite.rows.measurements import MEASUREMENT
from ...learning.brain import Brain, BrainSettings
from ...learning.knowledge import Knowledge
from ...modeling.cost_prior import CostPrior
from ...modeling.features import DEFAULT_CELL, cell_of
from .estimates import CostEstimates
from .legality import fits
from .medians import Estimate, Grade
from .table import Shape

MAX_PLAYED_CALLS: Final = 400
"""Calls simulated per shape; further calls of the trace run the last choice."""
MAX_PLAYED_STEPS: Final = 2000
CALL_SPREAD: Final = 0.05
"""Relative spread of single simulated calls."""
STEP_OVER_COMMUNICATION: Final = 3.0
"""Assumed ratio of a step's length to its communication, if the trace has no lengths."""


@dataclass(frozen=True)
class Mixture:
    """Settings and the share of calls that each would have run in; shares add up to 1."""

    shares: tuple[tuple[Candidate, float], ...]

    @property
    def simplified(self) -> Candidate | Mixture:
        """The setting itself if there is only one."""
        return self.shares[0][0] if len(self.shares) == 1 else self

    def __str__(self) -> str:
        most = max(self.shares, key=lambda one: one[1])
        return f"{most[0]} in {100 * most[1]:.0f} %, {len(self.shares) - 1} more"


Choice = Callable[["Arms"], int]


class Arms:
    """One shape's settings under a bandit, which learns the logarithm of times."""

    def __init__(self, n_arms: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sums = np.zeros(n_arms)
        self.counts = np.zeros(n_arms)

    def play(self, choose: Choice, logs: Sequence[float]) -> None:
        """Simulate one call, in which arm `at` takes about exp(logs[at]); each arm is first tried once."""
        untried = np.flatnonzero(self.counts == 0)
        arm = int(untried[0]) if untried.size else choose(self)
        self.counts[arm] += 1
        self.sums[arm] += logs[arm] + CALL_SPREAD * self.rng.standard_normal()


def lowest_bound(arms: Arms) -> int:
    """The arm with the lowest confidence bound on its time."""
    bound = arms.sums / arms.counts - CALL_SPREAD * np.sqrt(2 * math.log(arms.counts.sum()) / arms.counts)
    return int(np.argmin(bound))


def lowest_draw(arms: Arms) -> int:
    """The arm with the lowest draw from its normal posterior."""
    return int(np.argmin(arms.rng.normal(arms.sums / arms.counts, CALL_SPREAD / np.sqrt(arms.counts))))


def play_bandit(choose: Choice, estimates: CostEstimates, shape: Shape, n_calls: int) -> Mixture:
    """Shares of calls in which a bandit would have run each setting measured for the shape.

    At most MAX_PLAYED_CALLS of the trace's `n_calls` are simulated; the others run the last choice.
    """
    # The settings that NCCL itself chose are among the candidates, too.
    known = list(dict.fromkeys([BASELINE, *estimates.candidates(shape)]))
    logs = [math.log(found.cost_us) for one in known if (found := estimates.estimate(shape, one)) is not None]
    if len(logs) < len(known) or len(known) == 1:
        return Mixture(((BASELINE, 1.0),))
    seed = hash((shape.n_ranks, shape.n_nodes, int(shape.collective), int(shape.phase), shape.message_bytes))
    arms = Arms(len(known), seed & 0xFFFFFFFF)
    played = min(n_calls, MAX_PLAYED_CALLS)
    for _ in range(played):
        arms.play(choose, logs)
    counts = arms.counts
    counts[int(np.argmax(counts))] += n_calls - played
    return _mixture(dict(zip(known, counts.tolist(), strict=True)))


def _mixture(counts: Mapping[Candidate, float]) -> Mixture:
    total = sum(counts.values())
    return Mixture(tuple((candidate, count / total) for candidate, count in counts.items() if count))


_Place = tuple[CommunicatorClass, Collective]


class _OnlyKnown(CostPrior):
    """NCCL's cost, but only settings with evidence can be requested."""

    def __init__(self, facts: Mapping[str, str | int | float | bool], known: Mapping[_Place, set[Candidate]]) -> None:
        super().__init__(facts)
        self._known = known

    def candidates(self, communicator: CommunicatorClass, collective: Collective) -> tuple[Candidate, ...]:
        known = self._known.get((communicator, collective), set())
        return (BASELINE, *sorted(known - {BASELINE}, key=str))


def play_tuner(
    estimates: CostEstimates,
    counts: Mapping[Shape, int],
    n_steps: int,
    step_us: float | None,
    facts: Mapping[str, str | int | float | bool],
) -> dict[Shape, Mixture]:
    """Shares of calls in which our tuner would have run each setting, with steps as a daemon would get them.

    Plans come into force at the next step. `step_us` is the length of a step; None: STEP_OVER_COMMUNICATION times its
    communication. `counts` are calls in the whole trace.
    """
    shapes = [shape for shape in counts if estimates.estimate(shape, BASELINE) is not None]
    known: dict[_Place, set[Candidate]] = {}
    for shape in shapes:
        known.setdefault((shape.communicator, shape.collective), set()).update(estimates.candidates(shape))
    brain = Brain("replay", "fabric", facts, Knowledge(), BrainSettings(), lambda: 0.0)
    brain.restrict(_OnlyKnown(facts, known))
    per_step = {shape: max(1, round(counts[shape] / max(n_steps, 1))) for shape in shapes}
    rng = np.random.default_rng(0)
    ran: dict[Shape, dict[Candidate, float]] = {shape: {} for shape in shapes}
    asked: dict[DecisionKey, Candidate] = {}
    in_force, adopted_at, n_played = Plan(0), 0, min(max(n_steps, 1), MAX_PLAYED_STEPS)
    for step in range(n_played):
        rows = []
        for shape in shapes:
            candidate = asked.get(shape.key, BASELINE)
            found = estimates.estimate(shape, candidate)
            if found is None:  # only its neighbour in the size class has evidence
                candidate, found = BASELINE, estimates.estimate(shape, BASELINE)
            assert found is not None
            counted = ran[shape]
            last_share = 1 if step + 1 < n_played else 1 + n_steps - n_played
            counted[candidate] = counted.get(candidate, 0.0) + last_share
            for noise in rng.standard_normal(per_step[shape]).tolist():
                rows.append(_row(shape, candidate, found.cost_us * math.exp(CALL_SPREAD * noise), in_force.epoch, step))
        block = np.array(rows, MEASUREMENT)
        brain.observe(block)
        communication_us = float(block["duration_us"].sum())
        brain.step_finished(StepRecord(step, in_force.epoch, step_us or STEP_OVER_COMMUNICATION * communication_us))
        plan = brain.propose() or in_force.at(step + 1 - adopted_at)
        if plan is not in_force:
            in_force, adopted_at = plan, step + 1
            asked = {
                DecisionKey(row.communicator, row.collective, phase, size_class(row.min_bytes)): row.candidate
                for row in plan.rows
                for phase in row.phases
            }
            brain.adopted(plan.epoch, step + 1)
    return {shape: _mixture(counted) for shape, counted in ran.items()}


def _row(shape: Shape, candidate: Candidate, us: float, epoch: int, step: int) -> tuple[object, ...]:
    cell: Sequence[int] = DEFAULT_CELL if candidate.is_baseline else cell_of(candidate)
    return (
        shape.n_ranks, shape.n_nodes, shape.message_bytes, us, epoch, step, math.nan, int(shape.collective),
        int(shape.phase), *cell, candidate.n_channels, candidate.is_baseline, 0, 0, int(TimingSource.emulated), 0,
    )  # fmt: skip


DOUBT_Z: Final = 1.0
"""The model's setting is used only if its gain exceeds this many of its standard deviations."""
MIN_GAIN: Final = 0.01


@dataclass(frozen=True)
class PolicyContext:
    """The data that policies may use."""

    estimates: CostEstimates
    knowledge: Knowledge = field(default_factory=Knowledge)
    """Knowledge from other jobs on this fabric."""
    costs: CostPrior | None = None
    """NCCL's own cost; None: the fabric is not described."""
    plan: Sequence[PlanRow] | None = None
    """A static table given by the user."""
    counts: Mapping[Shape, int] = field(default_factory=dict)
    n_steps: int = 0
    step_us: float | None = None
    """Length of the logged steps."""
    facts: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """The fabric's description in the trace."""
    fabric: Fabric | None = None
    """The fabric itself; None: it is not described."""

    @cached_property
    def tuned(self) -> Mapping[Shape, Mixture]:
        """The settings that our tuner would have run; computed once."""
        counts = {shape: count for shape, count in self.counts.items() if fits(self.fabric, shape.communicator)}
        return play_tuner(self.estimates, counts, self.n_steps, self.step_us, self.facts)


def baseline(context: PolicyContext, shape: Shape) -> Candidate:
    """Leave NCCL alone."""
    del context, shape
    return BASELINE


def table(context: PolicyContext, shape: Shape) -> Candidate:
    """A static table: the given plan, or else the setting that beat the baseline in earlier runs."""
    if context.plan is None:
        decided = context.knowledge.decided(shape.key)
        return decided[0] if decided is not None and context.estimates.may_run(shape, decided[0]) else BASELINE
    for row in context.plan:
        if row.holds_for(shape.communicator, shape.collective, shape.phase, shape.message_bytes):
            return row.candidate
    return BASELINE


def model(context: PolicyContext, shape: Shape) -> Candidate:
    """The setting with the lowest prediction from before this job, if its gain exceeds its doubt."""
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
    """Settings that the job may run, the baseline first; of channel counts with the same effect, the smallest."""
    found: dict[Candidate, Candidate] = {}
    for candidate in costs.candidates(shape.communicator, shape.collective):
        if context.estimates.may_run(shape, candidate):
            found.setdefault(in_effect(shape.collective, shape.message_bytes, candidate), candidate)
    return tuple(found.values())


def oracle(context: PolicyContext, shape: Shape) -> Candidate:
    """The best setting in hindsight, among all measured ones and those of `table` and `model`.

    A prediction counts by the upper end of its interval. With few samples, chance makes the gain look too large.
    """
    return min(_judged(context, shape), key=lambda one: one[0], default=(0.0, BASELINE))[1]


def has_others(context: PolicyContext, shape: Shape) -> bool:
    """Whether the oracle knows a cost of any setting besides NCCL's own choice."""
    judged = _judged(context, shape)
    # The same calls count for NCCL's own choice and for the setting that it chose.
    own = {cost_us for cost_us, candidate in judged if candidate.is_baseline}
    return any(cost_us not in own for cost_us, _ in judged)


def _judged(context: PolicyContext, shape: Shape) -> list[tuple[float, Candidate]]:
    """(cost, setting) of all settings with a cost; a prediction counts by the upper end of its interval."""
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
    """The winner at the nearest size that earlier runs measured, as if a sweep's table covered all sizes."""
    return context.estimates.nearest_winner(shape) or BASELINE


def ucb(context: PolicyContext, shape: Shape) -> Mixture:
    """A bandit per shape with confidence bounds; exploring is part of its cost."""
    return play_bandit(lowest_bound, context.estimates, shape, context.counts.get(shape, 1))


def thompson(context: PolicyContext, shape: Shape) -> Mixture:
    """A bandit per shape with posterior draws; exploring is part of its cost."""
    return play_bandit(lowest_draw, context.estimates, shape, context.counts.get(shape, 1))


def tuner(context: PolicyContext, shape: Shape) -> Mixture:
    """Our tuner, started without knowledge of earlier runs; exploring is part of its cost."""
    return context.tuned.get(shape, Mixture(((BASELINE, 1.0),)))


Policy = Callable[[PolicyContext, Shape], Candidate | Mixture]
POLICIES: Final[Mapping[str, Policy]] = {
    policy.__name__: policy for policy in (baseline, table, model, oracle, nearest, ucb, thompson, tuner)
}
DEFAULT_POLICIES: Final = ("baseline", "table", "model", "oracle")


def named(names: Sequence[str]) -> dict[str, Policy]:
    """The policies called `names`, in that order; UserError if one is none of POLICIES."""
    for name in names:
        if name not in POLICIES:
            raise UserError(f"there is no policy {name!r}", f"use one of {', '.join(POLICIES)}")
    return {name: POLICIES[name] for name in names}
