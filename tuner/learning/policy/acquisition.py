"""Which trial of a key, if any, may begin, and the verdict on one that runs.

It begins where NCCL offers it, expected improvement is worth it and the budget covers it. A trial's *risk* is what it
costs until it can be withdrawn, in microseconds of training time, on average over the cases in which it is slower and
those in which it is not. The trials of one window share what is left of the budget.
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
from .observations import (
    HORIZON_STEPS,
    MIN_GAIN,
    VERIFIED,
    CallEvidence,
    Contrast,
    level_of,
)
from .risk import Budget, TrialCost
from .surrogate import Surrogate

WORTHWHILE: Final = 0.003
"""A trial must be expected to gain as much (log) beyond MIN_GAIN, nothing where it turns out slower."""


class Option(NamedTuple):
    """A trial that may begin."""

    worth_us: float
    """Expected gain per step."""
    risk_us: float
    """What it costs on average until it can be withdrawn."""
    candidate: Candidate
    predicted_gain: tuple[float, float]
    """By how much (log) it should be faster than what usually runs, and the standard deviation of that."""
    reason: str
    once_us: float = 0.0
    """What connecting it takes."""


class AcquisitionInput(NamedTuple):
    """What a key's trial is chosen by; arrays have the shape of `options`."""

    options: Sequence[Candidate]
    posterior: tuple[Floats, Floats]
    """Mean (log us) and standard deviation (log) of each."""
    usual: Candidate
    """What mostly runs at the key."""
    log_now: float
    """Its log duration."""
    room_us: float
    """What is left of the budget."""
    calls_per_step: float
    charged_calls: float
    """Calls that a trial may run before it can be withdrawn, as far as the budget pays for their extra time."""
    once_us: Floats | float = 0.0
    """What each option costs besides, once: to be connected."""
    in_all_us: float = math.inf
    """What is left of all steps' budget, which alone pays for connections: one may take more than a window has."""

    @property
    def usual_us(self) -> float:
        """Duration of what mostly runs."""
        return math.exp(self.log_now)

    @property
    def risk_us(self) -> Floats:
        """What a trial of each costs on average until it can be withdrawn; nothing where it turns out faster."""
        mean, spread = self.posterior
        return expected_excess(mean - self.log_now, spread) * self.usual_us * self.charged_calls

    def best(self, may_try: Callable[[Candidate], bool], last: Container[Candidate]) -> Option | None:
        """The best trial that fits, if any, of those that may be tried at all; `last` come after all others."""
        (mean, spread), log_now, risk_us = self.posterior, self.log_now, self.risk_us
        improvement = expected_improvement(log_now - mean - MIN_GAIN, spread)
        # However doubtful it is, the budget decides: what nobody looks at is never learned of.
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
"""What a book tells of an algorithm and protocol that never ran here is tried where it would cost, were it so many
times slower, what HORIZON_STEPS earn the budget at most: at small messages first.
"""


class Options:
    """Asks what NCCL offers, what memory and the budget allow, and what is expected of it."""

    def __init__(self, surrogate: Surrogate, budget: Budget, memory: MemoryGate, trial_cost: TrialCost) -> None:
        self._surrogate, self._tables = surrogate, surrogate.tables
        self._budget = budget
        self._memory = memory
        self._price = trial_cost
        self._canaries: list[tuple[KeyState, Candidate]] = []
        """What the book's word was tried at, and with."""

    def best(self, state: KeyState, *, canaries_only: bool = False) -> Option | None:
        """The best trial of one key that fits what is left of the budget, be it of any kind; None if there is none."""
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
        """What the fleet's book says wins here, once. What it may cost is not the book's to say.

        What never ran here takes all that is left of the budget until it is measured: so it begins at one key. One
        catastrophe, and nothing more is taken from the book.
        """
        told = self._tables.knowledge.canary(state.key)
        if told is None or state.provisional is not None or any(tried in one.banned for one, tried in self._canaries):
            return None
        candidate, gain = self._tables.named(state, told[0]), told[1]
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
            reason=f"{self._tables.knowledge.told_by}: {saved(gain)} faster there, tried first here",
        )

    def _has_run(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether its algorithm and protocol were measured in the key's family."""
        evidence, places = self._surrogate.evidence, self._tables.places[:, :2]
        here = slice(len(evidence))
        algorithm, protocol = cell_of(candidate)
        ran = (evidence.algorithm[here] == algorithm) & (evidence.protocol[here] == protocol)
        ran &= evidence.n_calls[here] > 0
        return bool((places[evidence.key[here][ran]] == places[state.index]).all(axis=1).any())

    def may_try(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether a trial of it may begin at all."""
        if candidate in (state.incumbent, state.provisional) or candidate in state.banned:
            return False
        if state.channels_of(candidate) > state.max_channels:
            return False
        return self.may_run(state, candidate)

    def may_run(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether NCCL offers it and device memory allows it."""
        if not self._tables.offers(state.family, candidate):
            return False
        return self._memory.allows(self.what_runs(state, candidate), state.key.communicator)

    def would_connect(self, state: KeyState, candidate: Candidate) -> bool:
        """Whether it would take memory that it has not taken yet, or may not run at all."""
        return not self._memory.is_connected(candidate, state.key.communicator) or not self.may_run(state, candidate)

    @staticmethod
    def what_runs(state: KeyState, candidate: Candidate) -> Candidate:
        """The setting that is meant, NCCL's own where that is known."""
        return state.default_setting or candidate if candidate.is_baseline else candidate

TRIAL_STEPS: Final = 8
"""A trial that is still open after this many more steps of evidence is a tie: others come first now. What is probably
faster is provisional from then on and so goes on being measured; what is not is tried again later. A key with nothing
to try is looked at again after as many steps, and variants begin so long after the last trial.
"""
WORTH_GOING_ON: Final = 0.001
"""A trial ends when what it may still gain (log, expected) is less. What ends sooner is tried again, and steps that it
slows down in secret are more in all.
"""


class TrialVerdict(Enum):
    """What a trial's evidence says so far."""

    open = "open"
    better = "better"
    not_better = "not better"
    tie = "tie"


def judge(evidence: CallEvidence, state: KeyState, *, provisionals: bool = False) -> tuple[TrialVerdict, float, float]:
    """TrialVerdict on the trial of a key, or on its provisional setting, against its incumbent; always-valid.

    What earlier jobs measured may keep a provisional setting, but only what this job measures promotes anything. The
    error levels of all that is tried at a key sum to FALSE_PROMOTION.

    Args:
        state: the key, which has a trial or provisional.

    Returns:
        TrialVerdict, measured gain (log) and half width of its interval.
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
        believed, _ = _weighed(state.provisional_gain, contrast)
        return TrialVerdict.open if believed > 0 else TrialVerdict.not_better, gain, half
    usual = incumbent if state.provisional is None else evidence.find(state.index, state.provisional)
    if usual is not None and usual != incumbent:
        contrast = evidence.contrast(usual, slot)
    expected, std = state.predicted_gain if usual is None else _weighed(state.predicted_gain, contrast)
    edge = expected - MIN_GAIN  # that is expected where nothing turns out slower, and never more than in all
    if edge < WORTH_GOING_ON and expected_improvement(edge, std) < WORTH_GOING_ON:
        return TrialVerdict.not_better, gain, half
    if evidence.units(slot) >= state.trial_until_units:
        return TrialVerdict.tie if expected > MIN_GAIN else TrialVerdict.not_better, gain, half
    return TrialVerdict.open, gain, half


def _weighed(predicted_gain: tuple[float, float], contrast: Contrast) -> tuple[float, float]:
    """A gain (log) and its standard deviation: what was hoped for and measured."""
    (expected, std), (measured, pairs, sigma) = predicted_gain, contrast
    if not pairs:
        return predicted_gain
    variance = sigma**2 / pairs
    weight = 1.0 / std**2 + 1.0 / variance
    return (expected / std**2 + measured / variance) / weight, 1.0 / math.sqrt(weight)
