"""A brain in shadow: it decides and explains, but none of its plans ever runs.

It measures NCCL's own choices only. From these it predicts which of earlier jobs' results it would use, which setting
it would try first, and how much time each step should save.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import msgspec

from ....store.counted import counted
from ....store.records import BASELINE, Decision, DecisionKind, Plan
from ...modeling.posterior import expected_improvement
from ..brain import Brain
from ..policy.choice import Event
from ..policy.keys import KeyState
from .words import Z_90

FIRST_SUMMARY_STEP: Final = 50
"""The first summary comes after this many steps, each further one after twice as many."""
LEAST_STD: Final = 1e-6
"""Least standard deviation: expected improvement is not defined for 0."""


class PredictedGain(NamedTuple):
    """The predicted gain of a step, as a share of its time."""

    n_settings: int
    share: float
    std: float


class ShadowBrain(Brain):
    """A `Brain` whose `propose` returns no plan."""

    _next_summary_step = FIRST_SUMMARY_STEP

    def propose(self) -> Plan | None:
        """Decide; there is never a plan."""
        super().propose()
        if self._states and self._step >= self._next_summary_step:
            self._next_summary_step = 2 * self._step
            self._note(Event(self._states[0], BASELINE, DecisionKind.shadow, _in_words(self.predicted_gain())))
        return None

    def decisions(self) -> list[Decision]:
        """Decisions taken since the last call; their reasons say that they are not carried out."""
        return [msgspec.structs.replace(one, reason=f"in shadow: {one.reason}") for one in super().decisions()]

    def predicted_gain(self) -> PredictedGain:
        """The predicted gain of a step with proven and provisional settings, or else with trials.

        Trials count with their gains only: a slower one would be withdrawn.
        """
        budget, trial_cost = self.budget, self._policy.trial_cost
        if not budget.training_us:
            return PredictedGain(0, 0.0, 0.0)
        n_settings, saved_us, variance = 0, 0.0, 0.0
        for state in self._states[: len(trial_cost.traffic.per_step)]:
            found = self._predicted_us(state)
            if found is not None:
                rate = float(trial_cost.traffic.per_step[state.index])
                n_settings += 1
                saved_us += rate * found[0]
                variance += (trial_cost.exposed.share * rate * found[1]) ** 2
        step_us, (least, most) = budget.training_us / budget.n_steps, trial_cost.exposed.bounds
        variance += (saved_us * (most - least) / (2.0 * Z_90)) ** 2
        share = trial_cost.exposed.share
        return PredictedGain(n_settings, share * saved_us / step_us, math.sqrt(variance) / step_us)

    def _predicted_us(self, state: KeyState) -> tuple[float, float] | None:
        """The time that a call at one key should save, and its standard deviation; None if NCCL's choice stays."""
        evidence = self._regimes.evidence
        tried = state.trial if state.usual.is_baseline else None
        setting = tried or state.usual
        slot = evidence.find(state.index, BASELINE)
        at = self._tables.of(state).place.get(setting)
        if setting.is_baseline or at is None or slot is None or not evidence.n_calls[slot]:
            return None
        mean, spread = self._surrogate.posterior(state)
        gain, std = evidence.log_us(slot) - float(mean[at]), max(float(spread[at]), LEAST_STD)
        if not math.isfinite(gain):
            return None
        if tried is not None:
            gain = float(expected_improvement(gain, std))
        now_us = math.exp(evidence.log_us(slot))
        return -now_us * math.expm1(-gain), now_us * std


def _in_words(gain: PredictedGain) -> str:
    if not gain.n_settings:
        return "NCCL's own choices would have stayed everywhere"
    low, high = (100.0 * (gain.share + side * Z_90 * gain.std) for side in (-1, 1))
    return (
        f"at {counted(gain.n_settings, 'key')} another setting would run or be tried;"
        f" steps should be {100.0 * gain.share:.1f} % shorter by that (90 %: {low:.1f} to {high:.1f})"
    )
