"""Measurements attributed to what was asked, and turned into evidence, charges and alarms."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from store.records import Candidate
from tuner.features import Floats, Ints
from tuner.policy.budget import Budget
from tuner.policy.evidence import Calls, Evidence, group_median, grouped
from tuner.policy.stragglers import Stragglers
from tuner.policy.trial import KeyState
from tuner.regime import MIN_SHIFT, ChangeDetector, StepMeans, Together

MIN_RIPE_UNITS = 4
"""Steps of evidence before a slot's own noise may call a deviation a change."""
LEAST_SCALE = 0.01
STRAGGLES = 4.0
"""What a single call may say, in noise scales, about what calls take."""
ABSURD = 10.0
"""A call of so many times the incumbent's time may be a straggler: other calls of the same setting will tell."""
SUSPICIOUS = 1.0
"""Half of the calls deviate by more than so many noise scales: the network may have changed just now."""


class Intake:
    """Feeds one job's evidence; says what was catastrophically slow and what calls no longer take what they took.

    `extra_of_step` holds the microseconds that exploration added to each recent step.
    """

    def __init__(
        self,
        budget: Budget,
        catastrophic_ratio: float,
        on_catastrophe: Callable[[KeyState, Candidate, float], None],
    ) -> None:
        self._budget = budget
        self._log_catastrophe = math.log(catastrophic_ratio)
        self._on_catastrophe = on_catastrophe
        self._changes = ChangeDetector()
        self._together = Together()
        self._means = StepMeans()
        self._stragglers = Stragglers()
        self.extra_of_step: dict[int, float] = {}
        self.n_explored = 0
        """Calls that ran a setting on trial."""
        self.is_suspicious = False
        """The newest calls of settings that are not on trial are not what they were: no time to compare with before."""

    def reset(self) -> None:
        """A new regime began: deviations are counted afresh."""
        self._changes.reset()
        self._together.reset()
        self._means.reset()
        self._stragglers.reset()
        self.is_suspicious = False

    def shift(self, calls: Calls, steps: Ints, is_trial: npt.NDArray[np.bool_], evidence: Evidence) -> float | None:
        """How much (log) calls deviate from what they used to take once that is beyond doubt, else None."""
        slots, of, deviation = calls.slots, calls.of, calls.deviation
        keys = evidence.key[slots]
        watched = evidence.n_units[slots] >= MIN_RIPE_UNITS
        if not watched.all():
            if not watched.any():
                return None
            here = watched[of]
            of, deviation, steps = of[here], deviation[here], steps[here]
        scale = np.maximum(evidence.call_sigma(slots), LEAST_SCALE)
        of_usual = ~is_trial[keys][of]
        if of_usual.any():
            self.is_suspicious = abs(float(np.median((deviation / scale[of])[of_usual]))) > SUSPICIOUS

        def sigma(of_keys: Ints) -> Floats:
            result: Floats = np.maximum(evidence.sigma(of_keys), LEAST_SCALE)
            return result

        limits = STRAGGLES * scale[of]
        clipped = np.clip(deviation, -limits, limits)
        # What a setting used to take is the less certain the fewer its steps.
        clipped /= np.sqrt(1.0 + 1.0 / np.maximum(evidence.n_units[slots], 1))[of]
        for step in np.unique(steps).tolist():
            at = steps == step
            units = self._means.add(keys[of[at]], clipped[at], step, sigma)
            fired = self._changes.update(*units, evidence.drift(units.keys))
            if self._together.has_changed(units) and not len(fired):
                fired = units.keys
            if not len(fired):
                continue
            shift = self._changes.shift(fired)
            self._changes.reset()
            self._together.reset()
            if abs(shift) >= MIN_SHIFT:
                self._means.reset()
                return shift
        return None

    def charge(
        self,
        states: list[KeyState],
        slots: Ints,
        logs: Floats,
        steps: Ints,
        evidence: Evidence,
        *,
        exposed_share: float,
    ) -> None:
        """Account for calls of what is tried or verified, and report at once what is catastrophically slow.

        Only the `exposed_share` of what they took longer was waited for. Calls of incumbents among them cost nothing;
        of a straggler no more counts than ten times the incumbent's time.
        """
        tried, inverse = grouped(slots, len(evidence))
        usual = np.full(len(tried), np.nan)
        for place, key in enumerate(evidence.key[tried].tolist()):
            incumbent = evidence.find(key, states[key].incumbent)
            if incumbent is not None and incumbent != tried[place]:
                usual[place] = evidence.log_us(incumbent)
        known = np.isfinite(usual)[inverse]
        inverse, logs, steps = inverse[known], logs[known], steps[known]
        if not len(logs):
            return
        extra = exposed_share * (np.exp(logs) - np.exp(usual[inverse]))
        when, of_step = np.unique(steps, return_inverse=True)
        for step, extra_us in zip(when.tolist(), np.bincount(of_step, np.maximum(extra, 0.0)), strict=True):
            self.extra_of_step[step] = self.extra_of_step.get(step, 0.0) + float(extra_us)
        before = np.maximum(evidence.extra_us[tried], 0.0)
        charged = np.bincount(inverse, extra, minlength=len(tried))
        beyond = exposed_share * (np.exp(logs) - ABSURD * np.exp(usual[inverse]))
        of_call = tried[inverse]
        corrections = self._stragglers.corrections(of_call, beyond, evidence.n_calls[of_call])
        for slot, correction_us in corrections.items():
            charged[np.searchsorted(tried, slot)] += correction_us
        evidence.extra_us[tried] += charged
        self._budget.spend(float((np.maximum(evidence.extra_us[tried], 0.0) - before).sum()))
        excess = group_median(inverse, logs - usual[inverse])
        for place in np.unique(inverse[excess > self._log_catastrophe]).tolist():
            slot = int(tried[place])
            state, candidate = states[int(evidence.key[slot])], evidence.candidates[slot]
            if candidate in (state.trial, state.lead):
                self._on_catastrophe(state, candidate, math.exp(float(excess[inverse == place][0])))
