"""Chooses the trial of a key that may begin, and gives the verdict on one that runs.

A trial begins if NCCL offers the setting, its expected improvement is worth it and the budget covers its risk. The
*risk* is the expected cost until the trial can be withdrawn, in microseconds of training time. The trials of one
window share the rest of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from enum import Enum
from typing import Final, NamedTuple

import numpy as np

from ....store.records import BASELINE, Candidate
from ...modeling.features import Floats, cell_of
from ...modeling.posterior import expected_excess, expected_improvement
from ..explaining.words import predicted, saved
from .keys import KeyState
from .memory import MemoryGate
from .observations import HORIZON_STEPS, MIN_GAIN, VERIFIED, CallEvidence, Contrast, level_of
from .risk import Budget, TrialCost
from .surrogate import Surrogate

WORTHWHILE: Final = 0.003
"""Least expected improvement (log) of a trial beyond MIN_GAIN; a slower outcome counts as 0."""


class Option(NamedTuple):
    """A trial that may begin."""

    worth_us: float
    """Expected gain per step."""
    risk_us: float
    """Expected cost until it can be withdrawn."""
    candidate: Candidate
    predicted_gain: tuple[float, float]
    """By how much (log) it should be faster than the usual setting, and the standard deviation."""
    reason: str
    once_us: float = 0.0
    """How long training waits for its connection."""


class AcquisitionInput(NamedTuple):
    """Facts for the choice of a key's trial; arrays have the shape of `options`."""

    options: Sequence[Candidate]
    posterior: tuple[Floats, Floats]
    """Mean (log us) and standard deviation (log) of each."""
    usual: Candidate
    """The setting that usually runs at the key."""
    log_now: float
    """Log duration of `usual`."""
    room_us: float
    """Rest of the window's budget."""
    calls_per_step: float
    charged_calls: float
    """Calls that a trial runs before it can be withdrawn, times the charged share of their extra time."""
    once_us: Floats | float = 0.0
    """How long training waits once for each option's connection."""
    in_all_us: float = math.inf
    """Rest of all steps' budget. It pays for connections, since one may cost more than a window earns."""

    @property
    def usual_us(self) -> float:
        """Duration of `usual`."""
        return math.exp(self.log_now)

    @property
    def risk_us(self) -> Floats:
        """Expected cost of a trial of each option until it can be withdrawn; a faster outcome counts as 0."""
        mean, spread = self.posterior
        return expected_excess(mean - self.log_now, spread) * self.usual_us * self.charged_calls

    def best(self, may_try: Callable[[Candidate], bool], last: Container[Candidate]) -> Option | None:
        """The best trial that the budget covers among those that `may_try` allows; `last` come after all others."""
        (mean, spread), log_now, risk_us = self.posterior, self.log_now, self.risk_us
        improvement = expected_improvement(log_now - mean - MIN_GAIN, spread)
        # Doubtful options stay: the budget decides, since a setting that nobody tries is never learned.
        once_us = np.broadcast_to(self.once_us, risk_us.shape)
        fits = (improvement >= WORTHWHILE) & (risk_us <= self.room_us) & (risk_us + once_us <= self.in_all_us)
        best_first = sorted(np.flatnonzero(fits).tolist(), key=improvement.item, reverse=True)
        for index in sorted(best_first, key=lambda index: self.options[index] in last):
            if may_try(self.options[index]):
                log_us, std = float(mean[index]), float(spread[index])
                return Option(
                    worth_us=float(improvement[index]) * self.usual_us * self.calls_per_step,
                    risk_us=float(risk_us[index]),
                    once_us=float(once_us[index]),
                    candidate=self.options[index],
                    predicted_gain=(log_now - log_us, std),
                    reason=predicted(log_us, std, self.usual_us, self.usual),
                )
        return None


CANARY_RATIO: Final = 50.0
"""A recommended setting whose algorithm and protocol never ran here might be this many times slower. Its trial begins
at a key where that would cost at most what HORIZON_STEPS earn the budget: at small messages first.
"""


class Options:
    """Chooses among the settings that NCCL offers, memory allows and the budget covers."""

    def __init__(self, surrogate: Surrogate, budget: Budget, memory: MemoryGate, trial_cost: TrialCost) -> None:
        self._surrogate, self._tables = surrogate, surrogate.tables
        self._budget = budget
        self._memory = memory
        self._price = trial_cost
        self._canaries: list[tuple[KeyState, Candidate]] = []
        """Trials of recommended settings that began: the key and the setting."""

    def best(self, state: KeyState, *, canaries_only: bool = False) -> Option | None:
        """The best trial of one key that the rest of the budget covers, a recommended setting first; or None."""
        posterior, evidence = self._surrogate.posterior(state), self._surrogate.evidence
        slots = [evidence.find(state.index, one) for one in (state.usual, state.incumbent)]
        slot = slots[0] if slots[0] is not None else slots[1]
        if slot is None:
            return None
        options, trial_cost = self._tables.of(state).options, self._price
        is_new = [not self._memory.is_connected(self.what_runs(state, one), state.key.communicator) for one in options]
        free_us, free_in_all_us = self._budget.free_us
        case = AcquisitionInput(
            options,
            posterior,
            state.usual,
            evidence.log_us(slot),
            free_us,
            float(trial_cost.traffic.per_step[state.index]),
            trial_cost.first_calls(state.index) * trial_cost.charged_share,
            trial_cost.connection_us * np.array(is_new, np.float64),
            free_in_all_us,
        )
        canary = self._canary(state, case)
        if canary is not None:
            self._canaries.append((state, canary.candidate))
        if canary is not None or canaries_only:
            return canary
        return case.best(lambda one: self.may_try(state, one), state.retired)

    def _canary(self, state: KeyState, case: AcquisitionInput) -> Option | None:
        """A trial of the setting that the fleet's book recommends, once per key.

        The risk comes from this job, not from the book. A setting that never ran here reserves the rest of the budget
        until it is measured, so only one key tries it. After one catastrophe no more of these trials begin.
        """
        canary = self._tables.knowledge.canary(state.key)
        if canary is None or state.provisional is not None or any(tried in one.banned for one, tried in self._canaries):
            return None
        candidate, gain = self._tables.named(state, canary[0]), canary[1]
        if candidate not in case.options or candidate in state.trial_order or not self.may_try(state, candidate):
            return None
        at, budget, room_us = case.options.index(candidate), self._budget, case.room_us
        risk_us = float(case.risk_us[at])
        if risk_us <= room_us and not self._has_run(state, candidate):
            lent_us = HORIZON_STEPS * budget.fraction * budget.training_us / max(1, budget.n_steps)
            worst_us = CANARY_RATIO * case.usual_us * case.charged_calls
            risk_us = room_us if worst_us <= max(lent_us, room_us) else worst_us
        if risk_us > room_us:
            return None
        return Option(
            worth_us=gain * case.usual_us * case.calls_per_step,
            risk_us=risk_us,
            candidate=candidate,
            predicted_gain=(case.log_now - float(case.posterior[0][at]), float(case.posterior[1][at])),
            once_us=float(np.broadcast_to(case.once_us, case.risk_us.shape)[at]),
            reason=f"{self._tables.knowledge.recommended_by}: {saved(gain)} faster there, tried first here",
        )

    def _has_run(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether the candidate's algorithm and protocol were measured in the key's family."""
        evidence, places = self._surrogate.evidence, self._tables.places[:, :2]
        here = slice(len(evidence))
        algorithm, protocol = cell_of(candidate)
        ran = (evidence.algorithm[here] == algorithm) & (evidence.protocol[here] == protocol)
        ran &= evidence.n_calls[here] > 0
        return bool((places[evidence.key[here][ran]] == places[state.index]).all(axis=1).any())

    def may_try(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether a trial of the candidate may begin."""
        if candidate in (state.incumbent, state.provisional) or candidate in state.banned:
            return False
        if state.channels_of(candidate) > state.max_channels:
            return False
        return self.may_run(state, candidate)

    def may_run(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether NCCL offers the candidate and device memory allows it."""
        if not self._tables.offers(state.family, candidate):
            return False
        return self._memory.allows(self.what_runs(state, candidate), state.key.communicator)

    def would_connect(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether the candidate would take memory that it has not taken yet, or may not run at all."""
        return not self._memory.is_connected(candidate, state.key.communicator) or not self.may_run(state, candidate)

    @staticmethod
    def what_runs(state: KeyState, candidate: Candidate) -> Candidate:
        """The setting itself; for the baseline NCCL's own choice, if known."""
        return state.default_setting or candidate if candidate.is_baseline else candidate

TRIAL_STEPS: Final = 8
"""A trial that is still open after this many more steps of evidence is a tie. If the candidate is probably faster, it
becomes provisional; else it is tried again later. This is also the pause before a key with nothing to try is looked at
again, and between the last trial and variants.
"""
WORTH_GOING_ON: Final = 0.001
"""A trial ends if its expected improvement (log) is less. A larger limit would end trials sooner, but they would be
repeated and would slow down more steps in all.
"""


class TrialVerdict(Enum):
    """The verdict on a trial so far."""

    open = "open"
    better = "better"
    not_better = "not better"
    tie = "tie"


def judge(evidence: CallEvidence, state: KeyState, *, provisionals: bool = False) -> tuple[TrialVerdict, float, float]:
    """Always-valid verdict on a key's trial, or its provisional setting, against its incumbent.

    Earlier jobs' measurements may keep a provisional setting, but only this job's measurements promote one. The error
    levels of all trials at a key sum to FALSE_PROMOTION.

    The verdict comes with the measured gain (log) and the half width of its interval.
    """
    candidate = (state.provisional if provisionals else state.trial) or BASELINE
    slot, incumbent = evidence.find(state.index, candidate), evidence.find(state.index, state.incumbent)
    if slot is None or incumbent is None or not evidence.n_calls[slot] or not evidence.n_calls[incumbent]:
        return TrialVerdict.open, 0.0, math.inf
    contrast = evidence.contrast(incumbent, slot)
    alpha = VERIFIED if provisionals and state.provisional_is_proven else level_of(state.trial_order.get(candidate, 1))
    gain, half = contrast.gain, contrast.radius(alpha)
    is_proven = contrast.is_proven(alpha, MIN_GAIN)
    if is_proven and evidence.nearby(incumbent, slot).is_proven(max(alpha, VERIFIED), 0.0):
        return TrialVerdict.better, gain, half
    if provisionals:
        weighed, _ = _weighed(state.provisional_gain, contrast)
        return TrialVerdict.open if weighed > 0 else TrialVerdict.not_better, gain, half
    usual = incumbent if state.provisional is None else evidence.find(state.index, state.provisional)
    if usual is not None and usual != incumbent:
        contrast = evidence.contrast(usual, slot)
    expected, std = state.predicted_gain if usual is None else _weighed(state.predicted_gain, contrast)
    edge = expected - MIN_GAIN  # mean over the faster outcomes only; never more than the mean over all
    if edge < WORTH_GOING_ON and expected_improvement(edge, std) < WORTH_GOING_ON:
        return TrialVerdict.not_better, gain, half
    if evidence.units(slot) >= state.trial_until_units:
        return TrialVerdict.tie if expected > MIN_GAIN else TrialVerdict.not_better, gain, half
    return TrialVerdict.open, gain, half


def _weighed(predicted_gain: tuple[float, float], contrast: Contrast) -> tuple[float, float]:
    """A gain (log) and its standard deviation, from prediction and measurement."""
    (expected, std), (measured, pairs, sigma) = predicted_gain, contrast
    if not pairs:
        return predicted_gain
    variance = sigma**2 / pairs
    weight = 1.0 / std**2 + 1.0 / variance
    return (expected / std**2 + measured / variance) / weight, 1.0 / math.sqrt(weight)
