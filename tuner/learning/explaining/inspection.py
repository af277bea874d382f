"""A brain's state for tools and tests, as copies, so that nobody can change the brain through them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ....store.records import (
    BASELINE,
    Candidate,
    Decision,
    DecisionKey,
    DecisionKind,
    Exposure,
    HowKnown,
    MissingEvidence,
    Plan,
    Stage,
)
from ...fingerprint import StageFingerprint
from ...modeling.cost_prior import CostPrior
from ..policy.accounting import TrialAccounting
from ..policy.change_detection import Regimes
from ..policy.choice import Event, Policy
from ..policy.keys import CandidateTables, KeyState
from ..policy.overrides import EXPLORING
from ..policy.plans import Plans
from ..policy.risk import Budget
from ..policy.step_guard import StepFeedback
from ..policy.surrogate import Surrogate
from . import decision_records

Reasons = Mapping[Candidate, str]


class KeyView(NamedTuple):
    """The present state of one key."""

    key: DecisionKey
    incumbent: Candidate
    incumbent_reason: str
    trial: Candidate | None
    trial_reason: str
    predicted_gain: tuple[float, float]
    """By how much (log) the trial should be faster than `usual`, and the standard deviation of that."""
    provisional: Candidate | None
    provisional_is_proven: bool
    """Earlier jobs proved it."""
    usual: Candidate
    """The setting that runs when nothing is on trial."""
    default_setting: Candidate | None
    """NCCL's own choice here; None: not seen yet."""
    n_channels: int
    """The incumbent's channels; 0 if unknown."""
    max_channels: int
    """More channels slow training down, as a variant of the plan showed."""
    tried: tuple[Candidate, ...]
    """In the order of their trials."""
    banned: Reasons
    """Not tried again while the network is as it is."""
    retired: Reasons
    """Tried again after all others."""
    n_withdrawn: int
    """How often a promoted setting was withdrawn because steps were slower."""
    rests_until_step: int
    """No trial begins before this step."""
    is_watched: bool
    """Steps with the incumbent are still compared with steps before its promotion."""


class Prediction(NamedTuple):
    """The predicted and measured duration of a call with one setting."""

    us: float
    """Expected from all that is known now."""
    std: float
    """Standard deviation (log) of `us`."""
    guessed_us: float
    """Expected when the job began."""
    measured_us: float | None
    """Measured in this regime; None if it has not run."""
    n_calls: int
    """Calls measured in this regime."""


class VariantView(NamedTuple):
    """A variant of the plan that is on trial."""

    name: str
    settings: Mapping[DecisionKey, Candidate]
    """The settings that differ from those that the keys would run without it."""


class PlanView(NamedTuple):
    """The newest plan, in force or on its way; for a first look, the plan that follows it."""

    plan: Plan
    settings: Mapping[DecisionKey, Candidate]
    """The settings of all keys that were known when the plan was made."""
    explores: frozenset[DecisionKey]
    """Keys at which the plan runs a trial."""
    has_variant: bool


class Inspection:
    """The part of a brain that only shows its state."""

    settings: Any
    """`BrainSettings`, whose module imports this one."""
    budget: Budget
    job_id: str
    fabric_id: str
    _clock: Callable[[], float]
    _pending: list[tuple[Event, int]]
    """Decisions that nobody has read yet, and the epoch of the plan that carries each out."""
    _fingerprint: StageFingerprint
    _steps_of: Counter[Stage]
    """Steps that ended while each stage was shown; empty before the first was shown."""
    _accounting: TrialAccounting
    _costs: CostPrior
    _regimes: Regimes
    _plans: Plans
    _policy: Policy
    _states: list[KeyState]
    _step: int
    _is_freeze_noted = False
    _step_feedback: StepFeedback
    _surrogate: Surrogate
    _tables: CandidateTables

    def decisions(self) -> list[Decision]:
        """Decisions taken since the last call."""
        if 0 < self.settings.tune_steps <= self._step and self._states and not self._is_freeze_noted:
            self._is_freeze_noted = True
            words = "nothing new is tried any more (--tune-for)"
            frozen = Event(self._states[0], BASELINE, DecisionKind.freeze, words, self._step)
            self._pending.append((frozen, self._plans.next))
        pending, self._pending = self._pending, []
        tables, evidence, now_s = self._tables, self._regimes.evidence, self._clock()
        return [
            decision_records.decision(
                job_id=self.job_id,
                fabric_id=self.fabric_id,
                model_id=tables.knowledge.model_id,
                epoch=epoch,
                now_s=now_s,
                event=event,
                field=tables.of(event.state),
                evidence=evidence,
            )
            for event, epoch in pending
        ]

    @property
    def stage(self) -> Stage:
        """The ZeRO stage that the job's collectives showed in most steps since they first showed one."""
        return max(self._steps_of, key=lambda stage: self._steps_of[stage], default=self._fingerprint.stage)

    @property
    def missing_evidence(self) -> MissingEvidence:
        """The evidence that is missing to tell the stage."""
        return MissingEvidence.nothing if self.stage is not Stage.unknown else self._fingerprint.missing_evidence

    @property
    def n_explored(self) -> int:
        """Calls that ran a candidate on trial."""
        return self._accounting.n_explored

    @property
    def spent_percent(self) -> float:
        """The cost of exploration so far in percent of training time."""
        return 100.0 * self.budget.spent_us / self.budget.training_us if self.budget.training_us > 0 else 0.0

    @property
    def exposure(self) -> Exposure:
        """The share of communication that computation waits for, and how it is known."""
        exposed = self._policy.trial_cost.exposed
        if exposed.is_measured:
            return Exposure(HowKnown.measured, *exposed.bounds)
        how = HowKnown.unknown if exposed.bounds == (0.0, 1.0) else HowKnown.estimated
        return Exposure(how, *exposed.bounds)

    @property
    def regime(self) -> int:
        """Label of the network regime in force; 0 is the one the job began with."""
        return self._regimes.evidence.regime

    @property
    def n_regimes(self) -> int:
        """Regimes that the job has seen; one that came back counts once."""
        return self._regimes.n_changes + 1

    @property
    def n_keys(self) -> int:
        """Decision keys seen."""
        return len(self._states)

    @property
    def keys(self) -> tuple[KeyView, ...]:
        """All keys as they are now, in the order they were seen."""
        watched, withdrawn = self._step_feedback.promoted, self._step_feedback.withdrawn
        return tuple(
            _key_view(state, n_withdrawn=withdrawn.n_times(state.index), is_watched=state.index in watched)
            for state in self._states
        )

    @property
    def costs(self) -> CostPrior:
        """NCCL's settings, and their expected costs before anything is measured."""
        return self._costs

    @property
    def variant(self) -> VariantView | None:
        """The variant of the plan that is on trial."""
        variant = self._step_feedback.variants.on_trial
        return None if variant is None else VariantView(variant.name, self._by_key(variant.changes))

    @property
    def plan(self) -> PlanView | None:
        """The newest plan, in force or on its way; None while another daemon's plan is in force."""
        latest = self._plans.latest
        if latest is None:
            return None
        explores = frozenset(self._states[index].key for index in np.flatnonzero(EXPLORING[latest.overrides]).tolist())
        settings = self._by_key(dict(enumerate(latest.candidates)))
        return PlanView(latest.plan, settings, explores, latest.variant is not None)

    def predicted(self, key: DecisionKey) -> Mapping[Candidate, Prediction]:
        """The predicted and measured durations of every setting available at a known key, the baseline first."""
        state = next((state for state in self._states if state.key == key), None)
        if state is None:
            raise KeyError(key)
        evidence, last_posterior = self._regimes.evidence, state.last_posterior
        mean, std = self._surrogate.posterior(state)
        state.last_posterior = last_posterior
        field, found = self._tables.of(state), {}
        for at in np.flatnonzero(np.isfinite(mean)).tolist():
            slot = evidence.find(state.index, field.options[at])
            n_calls = 0 if slot is None else int(evidence.n_calls[slot])
            measured_us = math.exp(evidence.log_us(slot)) if slot is not None and n_calls else None
            guessed_us = math.exp(field.table[at, 4])
            found[field.options[at]] = Prediction(
                math.exp(mean[at]), float(std[at]), guessed_us, measured_us, n_calls
            )
        return MappingProxyType(found)

    def _by_key(self, settings: Mapping[int, Candidate]) -> Mapping[DecisionKey, Candidate]:
        return MappingProxyType({self._states[index].key: candidate for index, candidate in settings.items()})


def _key_view(state: KeyState, *, n_withdrawn: int, is_watched: bool) -> KeyView:
    return KeyView(
        state.key,
        state.incumbent,
        state.incumbent_reason,
        state.trial,
        state.trial_reason,
        state.predicted_gain,
        state.provisional,
        state.provisional_is_proven,
        state.usual,
        state.default_setting,
        state.channels_of(state.incumbent),
        state.max_channels,
        tuple(sorted(state.trial_order, key=lambda one: state.trial_order[one])),
        MappingProxyType({**state.banned}),
        MappingProxyType({**state.retired}),
        n_withdrawn,
        state.cooldown_until,
        is_watched,
    )
