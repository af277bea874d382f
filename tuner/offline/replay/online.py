"""Policies that learn while they run, played against a trace's evidence: what would learning have cost?

A static policy names one setting per shape. One that explores runs several, so its answer is a *mixture*: how
often each would have run in as many calls as the trace has. Every call draws its duration from the evidence of
its shape and setting, with the trace's own spread; settings without evidence cannot be tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from zerotune.store.records import (
    BASELINE,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Plan,
    StepRecord,
    TimingSource,
    size_class,
)
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.features import DEFAULT_CELL, CostPrior, cell_of
from zerotune.tuner.offline.replay.estimates import CostEstimates
from zerotune.tuner.offline.replay.table import Shape

MAX_PLAYED_CALLS: Final = 400
"""Calls played per shape; a longer trace goes on with the last choice."""
MAX_PLAYED_STEPS: Final = 2000
CALL_SPREAD: Final = 0.05
"""Relative spread of single calls in a play."""
STEP_OVER_COMMUNICATION: Final = 3.0
"""Length of a step over its communication, where the trace does not say it."""


@dataclass(frozen=True)
class Mixture:
    """Settings and the share of calls that each would have run in; shares add up to 1."""

    shares: tuple[tuple[Candidate, float], ...]

    @property
    def simplified(self) -> Candidate | Mixture:
        """The setting itself where there is one only."""
        return self.shares[0][0] if len(self.shares) == 1 else self

    def __str__(self) -> str:
        most = max(self.shares, key=lambda one: one[1])
        return f"{most[0]} in {100 * most[1]:.0f} %, {len(self.shares) - 1} more"


Choice = Callable[["Arms"], int]


class Arms:
    """One shape's settings under a bandit; time is learnt as its logarithm."""

    def __init__(self, n_arms: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.sums = np.zeros(n_arms)
        self.counts = np.zeros(n_arms)

    def play(self, choose: Choice, logs: Sequence[float]) -> None:
        """Play one call, of which arm `at` takes about exp(logs[at]); each arm is tried once first."""
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
    """Play a bandit on one shape, over the settings that were measured for it.

    Args:
        choose: the arm to play, by what is known of all.
        estimates: what is known of costs.
        shape: what is played.
        n_calls: calls of that shape in the trace; MAX_PLAYED_CALLS of them are played, the others run the last choice.

    Returns:
        How often each setting ran; the baseline alone where only that has a cost.
    """
    # What ran by NCCL's own choice is among the candidates, too.
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
    """NCCL's cost, but only settings with evidence can be asked for."""

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
    """Feed our own tuner step by step, as its daemon would; plans come into force at the next step.

    Args:
        estimates: what is known of costs.
        counts: calls of each shape in the trace.
        n_steps: steps of the trace.
        step_us: length of a step; None: STEP_OVER_COMMUNICATION times its communication.
        facts: the fabric's description.

    Returns:
        By shape, how often each setting ran.
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
            if found is None:  # its neighbour in the size class has evidence, it has none itself
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
        int(shape.phase), *cell, candidate.n_channels, candidate.is_baseline, 0, 0, int(TimingSource.emulated),
    )  # fmt: skip
