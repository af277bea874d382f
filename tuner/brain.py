"""One job's brain: measurements in, plans out. Pure: clock, knowledge and settings are passed in.

    observe / step_finished / sequence / cost_tables / adopted   what the job reports
    propose                                                      a new plan, or None
    decisions                                                    why, for the store and for people

A plan assigns every key its incumbent or, for a window of steps, the candidate on trial. Measurements are
attributed by the epoch they ran under, so that what was *asked* is judged, whatever NCCL made of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from store.records import (
    Candidate,
    Collective,
    CommunicatorClass,
    Decision,
    Outcome,
    Plan,
    Stage,
    StepRecord,
)
from tuner import explain
from tuner.features import NO_CELL, CostPrior, Floats, Ints
from tuner.guard import Alarm, Guard
from tuner.knowledge import Knowledge
from tuner.policy import step_trial
from tuner.policy.budget import Budget
from tuner.policy.choice import RETRY_STEPS, Event, Policy, PolicySettings
from tuner.policy.evidence import Evidence, group_median
from tuner.policy.keys import KeyTable
from tuner.policy.plans import PlanBook, PlanInForce, rows_of, unchanged
from tuner.policy.step_trial import StepTrials
from tuner.policy.trial import KeyState
from tuner.regime import ChangeDetector, Regimes
from tuner.stage import StageFingerprint

OFFER_PATIENCE_STEPS: Final = 50
RECENT_STEPS: Final = 120
MAX_SUMMED_KEYS: Final = 256
NEVER_STEP: Final = 2**62
GUARD_WAITS_STEPS: Final = 3
"""How many steps the measurements of a step may come after its record."""
PLAN_EXPIRES_AFTER: Final = 1000


class BrainSettings(msgspec.Struct, frozen=True):
    """What `zerotune daemon` lets people change."""

    budget_fraction: float = 0.01
    memory_threshold: float = 0.92
    min_gain: float = 0.005
    false_promotion: float = 0.01
    catastrophic_ratio: float = 2.0
    window_steps: int = 1
    """Steps a plan runs before the next one may replace it."""
    explore: bool = True


@dataclass
class _Promotion:
    state: KeyState
    candidate: Candidate
    previous: Candidate
    number: int
    since_step: int | None = None
    """Step from which a plan with it was in force."""


class Brain:
    """Learns one job and proposes its plans; not thread-safe, raises on programming errors only."""

    def __init__(
        self,
        job_id: str,
        fabric_id: str,
        fabric: Mapping[str, str | int | float | bool],
        knowledge: Knowledge,
        settings: BrainSettings,
        clock: Callable[[], float],
    ) -> None:
        self.job_id = job_id
        self.fabric_id = fabric_id
        self.settings = settings
        self._clock = clock
        self._costs = CostPrior(fabric)
        self.budget = Budget(settings.budget_fraction if settings.explore else 0.0)
        self._policy = Policy(
            PolicySettings(
                false_promotion=settings.false_promotion,
                min_gain=settings.min_gain,
                catastrophic_ratio=settings.catastrophic_ratio,
                memory_threshold=settings.memory_threshold,
                steps_per_window=settings.window_steps + 2.0,
            ),
            self._costs,
            self.budget,
            self._report,
        )
        self._policy.knowledge = knowledge
        self._regimes = Regimes()
        self._changes = ChangeDetector()
        self._guard = Guard()
        self._fingerprint = StageFingerprint()
        self._keys = KeyTable(self._new_key)
        self._states = self._keys.states
        self._active = 0
        self._offered: int | None = None
        self._offered_at_step = 0
        self._next_epoch = 1
        self._plans = PlanBook()
        self._step = 0
        self._steps_in_epoch = 0
        self._planned_at_step = -1
        self._urgent = True
        self._pending: list[tuple[Event, int]] = []
        self._step_trials = StepTrials()
        self._promotions: list[_Promotion] = []
        self._n_promotions = 0
        self._withdrawn: list[_Promotion] = []
        self._adopted_changes = 0
        self._unguarded: deque[StepRecord] = deque()
        self._recent_steps: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Epoch and duration (us) without exploration's cost, oldest first."""
        self._extra_of_step: dict[int, float] = {}
        self.n_explored = 0

    @property
    def stage(self) -> Stage:
        """The kind of training the job's collectives show."""
        return self._fingerprint.stage

    @property
    def knowledge(self) -> Knowledge:
        """What is known from earlier runs; assign to swap in what the trainer has just fitted."""
        return self._policy.knowledge

    @knowledge.setter
    def knowledge(self, knowledge: Knowledge) -> None:
        self._policy.knowledge = knowledge
        self._policy.forget_priors(self._states)

    @property
    def spent_percent(self) -> float:
        """Exploration's cost so far in percent of training time."""
        return self.budget.spent_percent

    @property
    def regime(self) -> int:
        """Label of the network regime in force; 0 is the one the job began with."""
        return self._regimes.label

    @property
    def n_keys(self) -> int:
        """Decision keys seen."""
        return len(self._states)

    def restrict(self, costs: CostPrior) -> None:
        """Predict from `costs` instead of the fabric's description, before anything was observed.

        For replays and benchmarks that can only run what was measured.
        """
        self._costs = self._policy.costs = costs

    # ---- what the job reports -----------------------------------------------------------------

    def observe(self, block: npt.NDArray[np.void]) -> None:
        """Take in measurements joined over the ranks (MEASUREMENT_FIELDS), in the order they happened."""
        block = block[(block["outcome"] == Outcome.ok) & (block["duration_us"] > 0) & (block["message_bytes"] > 0)]
        if not len(block):
            return
        keys = self._keys.indices(block, self._costs)
        known = keys >= 0
        if not known.all():
            block, keys = block[known], keys[known]
        logs = self._keys.logs(block, keys)
        epochs = block["epoch"].astype(np.int64)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            if of_epoch.all():
                self._take_in(int(epoch), block, keys, logs)
            else:
                self._take_in(int(epoch), block[of_epoch], keys[of_epoch], logs[of_epoch])
        if self._regimes.recognise():
            self._new_evidence(f"the network is as it was in regime {self._regimes.label}")

    def cost_tables(self, block: npt.NDArray[np.void]) -> None:
        """Take in live cost tables (COST_FIELDS)."""
        is_new = False
        for row in block:
            if row["collective"] in _COLLECTIVES and row["message_bytes"] > 0:
                is_new |= self._costs.learn_live(
                    CommunicatorClass(int(row["n_ranks"]), int(row["n_nodes"])),
                    Collective(int(row["collective"])),
                    int(row["message_bytes"]),
                    row["cost_us"],
                )
        if is_new:
            self._policy.forget_priors(self._states)

    def step_finished(self, step: StepRecord) -> None:
        """Rank 0 has finished a training step."""
        self._step = max(self._step, step.step)
        self.budget.earn(step.duration_us)
        if step.memory_pressure is not None and math.isfinite(step.memory_pressure):
            self._policy.memory_pressure = step.memory_pressure
        if step.epoch == self._active:
            self._steps_in_epoch += 1
        if step.exposed_us is not None and math.isfinite(step.exposed_us):
            self._learn_exposed(step.exposed_us)
        self._unguarded.append(step)
        self._guard_steps()

    def sequence(self, block: npt.NDArray[np.void]) -> None:
        """Take in rank 0's records (OBSERVATION_FIELDS) in the order they were enqueued."""
        if self._fingerprint.add(
            block["collective"].astype(np.int64),
            block["message_bytes"].astype(np.int64),
            block["step"].astype(np.int64),
        ):
            self._urgent = True

    def adopted(self, epoch: int, step: int) -> None:
        """All ranks run under `epoch` from `step` on."""
        if epoch < self._active:
            return
        self._active = epoch
        self._steps_in_epoch = 0
        if self._offered is not None and epoch >= self._offered:
            self._offered = None
        self._next_epoch = max(self._next_epoch, epoch + 1)
        in_force = self._plans.get(epoch)
        if in_force is not None and in_force.n_changes > self._adopted_changes:
            self._adopted_changes = in_force.n_changes
            promoted = []
            for promotion in self._promotions:
                if promotion.since_step is None and promotion.number <= in_force.n_changes:
                    promotion.since_step = step
                    promoted.append(promotion)
            self._guard.changed(self._steps_without(promoted))

    # ---- what the job is told ---------------------------------------------------------------------

    def propose(self) -> Plan | None:
        """The next plan, None while the one in force (or on its way) should run on."""
        if not self._states:
            return None
        if not self._urgent:
            waiting = self._offered is not None
            if waiting and self._step - self._offered_at_step < OFFER_PATIENCE_STEPS:
                return None
            if self._steps_in_epoch < self.settings.window_steps or self._step == self._planned_at_step:
                return None
        self._urgent = False
        self._planned_at_step = self._step
        self._keys.update_rates(self._step)
        candidates = self._policy.next_window(
            self._states, self._regimes.evidence, self._step, may_start=self._step_trials.variant is None
        )
        if self.settings.explore:
            self._try_variants(candidates)
        latest = self._plans.get(self._active if self._offered is None else self._offered)
        if unchanged(latest, candidates, self._fingerprint.gathers_after_step):
            return None
        return self._offer(candidates)

    def decisions(self) -> list[Decision]:
        """Decisions taken since the last call."""
        pending, self._pending = self._pending, []
        evidence, now_s = self._regimes.evidence, self._clock()
        return [
            explain.decision(
                job_id=self.job_id,
                fabric_id=self.fabric_id,
                model_id=self._policy.knowledge.model_id,
                epoch=epoch,
                now_s=now_s,
                state=event.state,
                candidate=event.candidate,
                kind=event.kind,
                reason=event.reason,
                evidence=evidence,
                posterior=self._policy.posterior(event.state, self._states, evidence),
            )
            for event, epoch in pending
        ]

    # ---- inside ------------------------------------------------------------------------------------

    def _report(self, event: Event) -> None:
        self._pending.append((event, self._next_epoch))
        if event.kind == "promote":
            self._n_promotions += 1
            previous = event.state.previous
            self._promotions.append(_Promotion(event.state, event.candidate, previous, self._n_promotions))

    def _new_key(self, state: KeyState) -> None:
        self._policy.register(self._states, state)
        self._urgent |= state.is_trusted

    def _take_in(self, epoch: int, block: npt.NDArray[np.void], keys: Ints, logs: Floats) -> None:
        in_force = self._plans.get(epoch)
        if in_force is None:
            return  # a plan of another daemon's time: what was asked is unknown
        evidence = self._regimes.evidence
        slots = self._plans.slots(epoch, self._states, evidence)[keys]
        steps = block["step"].astype(np.int64)
        self._keys.count(keys)
        last = int(steps.max())
        self._step = max(self._step, last)
        self._keys.learn_defaults(block, keys, self._costs)
        algorithms = np.unique(block["algorithm"])
        self._policy.connected.update(algorithms[algorithms != NO_CELL].tolist())
        is_trial = np.zeros(len(keys), np.bool_)
        planned = keys < len(in_force.is_trial)
        is_trial[planned] = in_force.is_trial[keys[planned]]
        self._watch_residuals(keys[~is_trial], slots[~is_trial], logs[~is_trial], evidence)
        if evidence is not self._regimes.evidence:
            evidence = self._regimes.evidence
            slots = self._plans.slots(epoch, self._states, evidence)[keys]
        if is_trial.any():
            self._charge(keys[is_trial], slots[is_trial], logs[is_trial], steps[is_trial], evidence)
        evidence.add(slots, logs, steps)

    def _charge(self, keys: Ints, slots: Ints, logs: Floats, steps: Ints, evidence: Evidence) -> None:
        """Account for explored calls, and stop at once what is catastrophically slow."""
        self.n_explored += len(keys)
        tried, inverse = np.unique(slots, return_inverse=True)
        usual = np.full(len(tried), np.nan)
        for place, key in enumerate(evidence.key[tried].tolist()):
            incumbent = evidence.find(key, self._states[key].incumbent)
            if incumbent is not None:
                usual[place] = evidence.log_us(incumbent)
        known = np.isfinite(usual)[inverse]
        inverse, logs, steps = inverse[known], logs[known], steps[known]
        if not len(logs):
            return
        extra = np.exp(logs) - np.exp(usual[inverse])
        when, of_step = np.unique(steps, return_inverse=True)
        for step, extra_us in zip(when.tolist(), np.bincount(of_step, np.maximum(extra, 0.0)), strict=True):
            self._extra_of_step[step] = self._extra_of_step.get(step, 0.0) + float(extra_us)
        before = np.maximum(evidence.extra_us[tried], 0.0)
        evidence.extra_us[tried] += np.bincount(inverse, extra, minlength=len(tried))
        self.budget.spend(float((np.maximum(evidence.extra_us[tried], 0.0) - before).sum()))
        excess = group_median(inverse, logs - usual[inverse])
        for place in np.unique(inverse[excess > math.log(self.settings.catastrophic_ratio)]).tolist():
            slot = int(tried[place])
            state, candidate = self._states[int(evidence.key[slot])], evidence.candidates[slot]
            if state.trial == candidate:
                ratio = math.exp(float(excess[inverse == place][0]))
                why = f"{ratio:.1f} times slower than {state.incumbent}, not tried here again"
                self._policy.drop_trial(state, why, ban=True)
                self._urgent = True

    def _watch_residuals(self, keys: Ints, slots: Ints, logs: Floats, evidence: Evidence) -> None:
        ripe = evidence.n_units[slots] >= 4
        if not ripe.any():
            return
        keys, slots, logs = keys[ripe], slots[ripe], logs[ripe]
        residual = logs - evidence.centre(slots)
        scale = np.maximum(evidence.call_sigma(slots), 0.01)
        fired = self._changes.update(keys, residual / scale)
        if len(fired):
            self._changes.reset()
            shown = float(np.median(residual[np.isin(keys, fired)])) if np.isin(keys, fired).any() else 0.0
            self._regimes.begin()
            self._new_evidence(f"calls take {100 * (math.exp(shown) - 1):+.0f} % of what they took")

    def _new_evidence(self, reason: str) -> None:
        """The regime changed: verdicts are reopened, what runs stays until measured otherwise."""
        self._plans.forget_slots()
        self._changes.reset()
        self._step_trials.reset()
        for state in self._states:
            state.reopen()
        self._urgent = True
        if self._states:
            state = self._states[0]
            self._pending.append((Event(state, state.incumbent, "keep", f"regime change: {reason}"), self._next_epoch))

    def _steps_without(self, promoted: list[_Promotion]) -> list[float]:
        """Recent step durations (us) of plans that ran none of `promoted`."""
        told_apart: dict[int, bool] = {}
        found = []
        for epoch, duration_us in self._recent_steps:
            if epoch not in told_apart:
                in_force = self._plans.get(epoch)
                told_apart[epoch] = in_force is not None and not any(
                    one.state.index < len(in_force.candidates) and in_force.candidates[one.state.index] == one.candidate
                    for one in promoted
                )
            if told_apart[epoch]:
                found.append(duration_us)
        return found

    def _guard_steps(self) -> None:
        """Judge steps once their measurements are in, so that exploration's own cost can be taken off."""
        while self._unguarded and (self._unguarded[0].step < self._step or len(self._unguarded) > GUARD_WAITS_STEPS):
            step = self._unguarded.popleft()
            extra_us = self._extra_of_step.pop(step.step, 0.0)
            duration_us = max(step.duration_us - extra_us, 0.2 * step.duration_us)
            self._recent_steps.append((step.epoch, duration_us))
            in_force = self._plans.get(step.epoch)
            if self._step_trials.variant is not None and in_force is not None:
                self._judge_variant(in_force, duration_us, step.step)
                continue
            alarm = self._guard.step(duration_us)
            if alarm is not None:
                self._roll_back(alarm, step.step)
            if self._guard.recovered() is False:
                self._reinstate()
        for old in [known for known in self._extra_of_step if known < self._step - 2 * GUARD_WAITS_STEPS]:
            del self._extra_of_step[old]

    def _learn_exposed(self, exposed_us: float) -> None:
        evidence = self._regimes.evidence
        total_us = 0.0
        for state in self._states[:MAX_SUMMED_KEYS]:
            slot = evidence.find(state.index, state.incumbent)
            if slot is not None and evidence.n_calls[slot]:
                total_us += state.calls_per_step * math.exp(evidence.log_us(slot))
        if total_us > 0:
            share = min(1.0, max(0.0, exposed_us / total_us))
            self._policy.exposed_share += 0.1 * (share - self._policy.exposed_share)

    def _try_variants(self, candidates: list[Candidate]) -> None:
        """Once the keys have settled, let variants of the whole plan compete on step time."""
        trials = self._step_trials
        if any(state.trial is not None for state in self._states):
            if trials.variant is None:
                trials.postpone(self._step)
            return
        if trials.is_due(self._step) and not self._guard.is_watching and self.budget.remaining_us > 0:
            audits = trials.untried(step_trial.audits(self._states), self._step)
            variant = next(audits, None)
            if variant is None and not trials.has_capped:
                caps, all_fit = self._policy.channel_caps(self._states, self._regimes.evidence)
                variant = next(trials.untried(caps, self._step), None)
                trials.has_capped = variant is None and all_fit
            if variant is None:
                trials.postpone(self._step, RETRY_STEPS)
            else:
                trials.begin(variant, self._step)
        if trials.variant is not None and trials.is_on:
            for index, candidate in trials.variant.changes.items():
                candidates[index] = candidate

    def _judge_variant(self, in_force: PlanInForce, duration_us: float, step: int) -> None:
        trials = self._step_trials
        if in_force.is_trial.any() or in_force.variant not in (None, trials.variant):
            return
        extra_us, outcome = trials.step(duration_us, is_on=in_force.variant is not None)
        self.budget.spend(extra_us)
        if outcome is None:
            return
        trials.end(step)
        self._urgent = True
        if outcome.is_better:
            self._adopt_variant(outcome)

    def _adopt_variant(self, outcome: step_trial.Outcome) -> None:
        """Steps were faster with the variant: its settings become the incumbents."""
        saved = 100.0 * (1.0 - math.exp(-outcome.gain))
        reason = f"steps are {saved:.1f} % faster with {outcome.variant.name}"
        for index, candidate in outcome.variant.changes.items():
            state = self._states[index]
            kind = "rollback" if candidate.is_baseline else "promote"
            state.banned[state.incumbent] = reason
            if outcome.variant.max_channels is not None:
                state.max_channels = outcome.variant.max_channels
            state.previous, state.incumbent = state.incumbent, candidate
            state.incumbent_kind, state.incumbent_reason = kind, reason
            # It was judged by more than its own duration; only a new regime reopens the question.
            state.quiet_until = NEVER_STEP
            self._pending.append((Event(state, candidate, kind, reason), self._next_epoch))

    def _roll_back(self, alarm: Alarm, step: int) -> None:
        """Withdraw what was adopted when steps became slower; nothing, when nothing was."""
        onset = step - alarm.n_steps - GUARD_WAITS_STEPS
        guilty = [one for one in self._promotions if one.since_step is not None and one.since_step >= onset]
        guilty = [one for one in guilty if one.state.incumbent == one.candidate]
        if not guilty:
            self._guard.settled()
            return
        self._guard.rolled_back()
        reason = f"steps became {alarm.percent:.1f} % slower with it"
        for promotion in reversed(guilty):
            state = promotion.state
            state.incumbent, state.incumbent_kind = promotion.previous, "rollback"
            state.incumbent_reason = f"{promotion.candidate}: {reason}"
            state.banned[promotion.candidate] = reason
            self._report(Event(state, promotion.previous, "rollback", state.incumbent_reason))
        self._promotions = [one for one in self._promotions if one not in guilty]
        self._withdrawn = guilty
        self._urgent = True

    def _reinstate(self) -> None:
        """Steps stayed slow without the withdrawn plan, so it was not the cause."""
        for promotion in self._withdrawn:
            state = promotion.state
            state.banned.pop(promotion.candidate, None)
            if state.incumbent == promotion.previous:
                state.trial, state.is_trusted = None, False
                state.previous, state.incumbent = promotion.previous, promotion.candidate
                state.incumbent_kind = "promote"
                state.incumbent_reason = "reinstated: steps stayed slow without it"
                self._report(Event(state, promotion.candidate, "promote", state.incumbent_reason))
        self._withdrawn = []
        self._urgent = True

    def _offer(self, candidates: list[Candidate]) -> Plan:
        epoch = self._next_epoch
        self._next_epoch += 1
        rows = rows_of(self._states, candidates, self._policy.knowledge.model_id)
        plan = Plan(epoch, rows, PLAN_EXPIRES_AFTER, self._fingerprint.gathers_after_step)
        is_trial = np.array(
            [s.trial == c and not s.is_trusted for s, c in zip(self._states, candidates, strict=True)],
            dtype=np.bool_,
        )
        trials = self._step_trials
        variant = trials.variant if trials.is_on else None
        self._plans.add(PlanInForce(candidates, is_trial, plan, self._n_promotions, variant), self._active)
        self._offered, self._offered_at_step = epoch, self._step
        return plan


_COLLECTIVES: Final = frozenset(int(member) for member in Collective)
