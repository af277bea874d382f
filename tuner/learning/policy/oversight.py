"""What steps say about plans: promotions are guarded, and variants of the whole plan compete on step time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from zerotune.store.records import Candidate, StepRecord
from zerotune.tuner.learning.guard import WATCH_STEPS, Alarm, Guard, steps_to_know
from zerotune.tuner.learning.policy.choice import Event, Policy
from zerotune.tuner.learning.policy.evidence.evidence import Evidence
from zerotune.tuner.learning.policy.evidence.intake import Intake
from zerotune.tuner.learning.policy.plans import PlanBook, PlanInForce
from zerotune.tuner.learning.policy.steps.step_kinds import StepKinds
from zerotune.tuner.learning.policy.steps.step_trial import Variant
from zerotune.tuner.learning.policy.steps.variants import Variants
from zerotune.tuner.learning.policy.trials.pace import N_IN_A_ROW, Pace
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.learning.policy.trials.watched_trials import WatchedTrials
from zerotune.tuner.modeling.features import Ints

RECENT_STEPS: Final = 120
RETURN_WATCH_STEPS: Final = 20
"""How long settings that were withdrawn together are watched when they come back, one group after the other."""
_UNKNOWN: Final = 0.5
ENOUGH_BEFORE: Final = 12
"""So many steps without any trial at the keys of a promotion are yardstick enough."""
GUARD_WAITS_STEPS: Final = 3
"""How many steps the measurements of a step may come after its record."""
DOUBTFUL_SHARE: Final = 0.05
"""A step that lost more of its time to exploration says nothing about promotions: what it would have taken
otherwise is not known to the percent. The budget keeps such steps few.
"""
REST_STEPS: Final = 100
"""A key whose promotion made steps slower tries nothing for this many steps, twice as many after each further time."""


@dataclass(eq=False)
class Promotion:
    """A change of incumbent, until steps have spoken about it."""

    state: KeyState
    candidate: Candidate
    previous: Candidate
    number: int
    returns: bool = False
    """It was withdrawn once and came back to be watched alone."""
    since_step: int | None = None
    """Step from which a plan with it was in force."""


class Oversight:
    """Judges one job's plans by its steps.

    Args:
        policy: whose incumbents are rolled back, reinstated or replaced.
        plans: what ran under which epoch.
        intake: knows what exploration added to each step.
        report: takes decisions.
    """

    def __init__(self, policy: Policy, plans: PlanBook, intake: Intake, report: Callable[[Event], None]) -> None:
        self._policy = policy
        self._plans = plans
        self._intake = intake
        self._report = report
        self._guard = Guard()
        self._pace = Pace()
        self._kinds = StepKinds()
        self._variants = Variants(policy, plans, report)
        self._watched = WatchedTrials(policy, plans, REST_STEPS)
        self._promotions: list[Promotion] = []
        self._withdrawn: list[Promotion] = []
        self._suspects: list[list[Promotion]] = []
        """Withdrawn together; each group comes back alone, to be watched alone."""
        self.n_promotions = 0
        self._n_adopted = 0
        self._waiting: deque[StepRecord] = deque()
        self._guarded: deque[int] = deque(maxlen=WATCH_STEPS + 1)
        """The steps that the guard was shown, oldest first."""
        self._watch_from_step = 0
        self._tried: list[Promotion] = []
        """What came into force then; its trials were windows of it."""
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Epoch and duration (us) without exploration's cost, oldest first."""

    @property
    def variant(self) -> Variant | None:
        """The variant that runs in this window."""
        return self._variants.running

    @property
    def is_comparing(self) -> bool:
        """Steps are compared: a variant is on trial or prepared, or withdrawn settings are looked into."""
        return bool(self._withdrawn or self._suspects) or self._variants.is_comparing

    def leads_rest_at(self, n_keys: int) -> Collection[int] | None:
        """While steps are compared, the keys at which nothing may run that is not proven; else None."""
        if self._withdrawn or self._suspects:
            return range(n_keys)
        return self._variants.changed_keys

    @property
    def is_busy(self) -> bool:
        """Keys may begin no trials: steps are compared, or too few are known to guard by."""
        return self.is_comparing or self._watched.is_asking or len(self._recent) < steps_to_know(self._variants.noise)

    def reset(self) -> None:
        """The network's regime changed: all that steps and calls said is asked for anew."""
        self.reset_yardstick()
        self._watched.reset()
        self._suspects, self._withdrawn = [], []

    def reset_yardstick(self) -> None:
        """Steps of before are no yardstick: variants may all be asked for anew, no watch goes on."""
        self._variants.reset()
        self._recent.clear()
        self._guard.settled()

    def promoted(self, state: KeyState, candidate: Candidate) -> None:
        """A key's incumbent is `candidate` from the next plan on."""
        self.n_promotions += 1
        self._promotions.append(Promotion(state, candidate, state.previous, self.n_promotions))

    def enqueued(self, steps: Ints, message_bytes: Ints) -> None:
        """Calls of rank 0, shape [n] each: the steps in which they were enqueued and what they move."""
        self._kinds.enqueued(steps, message_bytes)

    def adopted(self, in_force: PlanInForce, step: int, n_keys: int, evidence: Evidence) -> None:
        """All ranks run `in_force` from `step` on.

        Args:
            in_force: the plan.
            step: its first step.
            n_keys: keys known.
            evidence: of the regime in force.
        """
        if in_force.n_changes <= self._n_adopted:
            return
        self._n_adopted = in_force.n_changes
        new = [one for one in self._promotions if one.since_step is None and one.number <= in_force.n_changes]
        if not new:
            return  # withdrawn before it came into force
        for promotion in new:
            promotion.since_step = step
        self._promotions = [
            one
            for one in self._promotions
            if self._guard.is_watching or one.since_step is None or step - one.since_step <= 2 * WATCH_STEPS
        ]
        if self._guard.is_watching:
            self._guard.changed_again()
        else:
            watch_steps = RETURN_WATCH_STEPS if any(one.returns for one in new) else WATCH_STEPS
            self._watch_from_step = step
            without_us, with_us = self._steps_by(new, n_keys, evidence)
            self._tried = [] if any(one.returns for one in new) else new
            tried_us = with_us if self._tried else ()
            self._guard.changed(without_us, watch_steps, tried_us, self._promised(new, without_us, evidence))

    def step_finished(self, step: StepRecord, known_step: int, states: list[KeyState], evidence: Evidence) -> bool:
        """Judge steps once their measurements are in, so that exploration's own cost can be taken off.

        Args:
            step: the newest step.
            known_step: newest step that measurements have come of.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            True when a new plan is due at once.
        """
        is_urgent = False
        self._waiting.append(step)
        while self._waiting and (
            self._waiting[0].step < known_step
            or len(self._waiting) > GUARD_WAITS_STEPS
            or self._explores_nothing(self._waiting[0].epoch)
        ):
            is_urgent |= self._judge(self._waiting.popleft(), states, evidence)
        return is_urgent

    def consider_variants(self, states: list[KeyState], evidence: Evidence, step: int) -> None:
        """Once the keys have settled, let variants of the whole plan compete on step time.

        Args:
            states: of all keys, by key index.
            evidence: of the regime in force.
            step: the newest step.
        """
        step_us = float(np.median([us for _, us in self._recent])) if self._recent else math.inf
        is_guarding = self._guard.is_watching or self._watched.is_asking or self.n_promotions > self._n_adopted
        self._variants.consider(states, evidence, step, step_us, may_begin=not is_guarding)

    def give_up(self, variant: Variant, ratio: float, states: list[KeyState], step: int) -> None:
        """End the trial of a variant some of whose calls are catastrophically slow; steps need not show it, too.

        Args:
            variant: on trial.
            ratio: times as long as what usually runs.
            states: of all keys, by key index.
            step: the newest step.
        """
        self._variants.give_up(variant, ratio, states, step)

    # ---- inside ---------------------------------------------------------------------------------------

    def _judge(self, step: StepRecord, states: list[KeyState], evidence: Evidence) -> bool:
        """One step of which all is known that will be; true when a new plan is due at once."""
        self._forget_extra(step.step - 2 * GUARD_WAITS_STEPS)
        in_force = self._plans.get(step.epoch)
        known_extra_us = self._intake.extra_of_step.pop(step.step, None)
        extra_us = known_extra_us or 0.0
        without_extra_us = max(step.duration_us - extra_us, 0.2 * step.duration_us)
        duration_us = self._kinds.usual_us(step.step, without_extra_us)
        if duration_us is None:
            return False
        is_doubtful = extra_us > DOUBTFUL_SHARE * step.duration_us
        if known_extra_us is None and in_force is not None:
            is_doubtful = self._tries_instead(in_force)
        is_doubtful |= self._intake.connections.finished(step.step, duration_us, [us for _, us in self._recent])
        if not is_doubtful:
            self._recent.append((step.epoch, duration_us))
            if in_force is not None:
                unsaved_us = duration_us + self._variants.saved_us(step.epoch, len(states), evidence)
                self._follow_pace(in_force, step.step, duration_us, unsaved_us, states)
                self._variants.learn(step, duration_us, states, evidence)
        is_urgent = False
        if in_force is not None and in_force.variant is None and not self._variants.is_on_trial:
            as_usual = duration_us / without_extra_us
            is_urgent |= self._watched.step(
                in_force,
                step.step,
                as_usual * step.duration_us,
                None if known_extra_us is None else as_usual * known_extra_us,
                states,
                evidence,
            )
        if self._variants.is_on_trial and in_force is not None:
            is_urgent |= self._variants.judge(in_force, duration_us, step.step, states, evidence)
        elif in_force is not None and in_force.variant is not None and not is_doubtful:
            self._variants.charge_late(duration_us)
        elif not is_doubtful:
            is_urgent |= self._guard_step(step, duration_us, len(states), evidence)
        return is_urgent

    def _guard_step(self, step: StepRecord, duration_us: float, n_keys: int, evidence: Evidence) -> bool:
        """The guard's say on one step, and what follows from it; true when a new plan is due at once."""
        if self._guard.is_watching and step.step < self._watch_from_step:
            # Records may come long after their steps: those of before the change are not its doing, but its trials.
            if self._shares(step.epoch, self._tried, n_keys, evidence)[0] == 1.0:
                self._guard.tried(duration_us)
            return False
        is_urgent = False
        self._guarded.append(step.step)
        alarm = self._guard.step(duration_us)
        if alarm is not None and not self._pace.is_in_doubt:
            is_urgent |= self._roll_back(alarm, step.step)
        recovered = self._guard.recovered()
        if recovered is False:
            self._suspects = []
            self._bring_back(self._withdrawn, "reinstated: steps stayed slow without it")
            is_urgent = True
        elif recovered:
            self._withdrawn = []
        if self._suspects and not self._withdrawn and not self._guard.is_watching:
            self._bring_back(self._suspects.pop(0), "on its own now: steps became slower when it came with others")
            is_urgent = True
        return is_urgent

    def _follow_pace(
        self, in_force: PlanInForce, step: int, duration_us: float, unsaved_us: float, states: list[KeyState]
    ) -> None:
        """Where the same settings take another time than before, steps of before are no yardstick any more.

        `unsaved_us` is what the step would have taken without what its plan saves as calls say.
        """
        shift = self._pace.step(
            self._plans.settings(in_force.plan.epoch),
            in_force.n_changes,
            math.log(duration_us),
            self._variants.noise,
            math.log(unsaved_us),
        )
        if shift is None or not states:
            return
        newest = [*self._recent][-N_IN_A_ROW:]
        self.reset_yardstick()
        self._watched.pace_changed()
        self._recent.extend(newest)
        words = f"training's own pace changed: steps take {math.exp(shift):.2f} times as long with the same settings"
        self._report(Event(states[0], states[0].incumbent, "pace", words, step))

    def _forget_extra(self, oldest: int) -> None:
        """What exploration added to steps that were judged long ago, or never will be."""
        extra = self._intake.extra_of_step
        while extra and (first := next(iter(extra))) < oldest:
            del extra[first]

    def _explores_nothing(self, epoch: int) -> bool:
        """Whether a step with that plan lost nothing to exploration, whatever its measurements will say."""
        in_force = self._plans.get(epoch)
        n_keys = len(self._policy.price.traffic.per_step)
        return in_force is not None and not in_force.is_trial.any() and not self._policy.verified(n_keys).any()

    def _tries_instead(self, in_force: PlanInForce) -> bool:
        """Whether a plan tries something else in place of what is under watch."""
        for promotion in self._promotions:
            at, candidate = promotion.state.index, promotion.candidate
            is_tried = at < len(in_force.is_trial) and in_force.is_trial[at]
            if is_tried and promotion.state.incumbent == candidate != in_force.candidates[at]:
                return True
        return False

    def _steps_by(self, promoted: list[Promotion], n_keys: int, evidence: Evidence) -> tuple[list[float], list[float]]:
        """Recent step durations (us): of plans that ran none of `promoted`, and of those that ran all of it.

        The former as their keys were before, where enough is known of that: what else was on trial there may have
        slowed steps down, too.
        """
        before: list[float] = []
        without_us: list[float] = []
        with_us: list[float] = []
        shares: dict[int, tuple[float, float]] = {}
        for epoch, duration_us in self._recent:
            if epoch not in shares:
                shares[epoch] = self._shares(epoch, promoted, n_keys, evidence)
            ran_it, ran_previous = shares[epoch]
            if ran_it == 1.0:
                with_us.append(duration_us)
            elif ran_it == 0.0:
                without_us.append(duration_us)
                if ran_previous == 1.0:
                    before.append(duration_us)
        return before if len(before) >= ENOUGH_BEFORE else without_us, with_us

    def _shares(self, epoch: int, promoted: list[Promotion], n_keys: int, evidence: Evidence) -> tuple[float, float]:
        """At what share of their keys the plan of `epoch` ran what is `promoted`, and what was there before it."""
        if not promoted or self._plans.get(epoch) is None:
            return _UNKNOWN, _UNKNOWN
        keys = [one.state.index for one in promoted]
        asked = [[evidence.slot(one.state.index, one.candidate) for one in promoted]]
        asked.append([evidence.slot(one.state.index, one.previous) for one in promoted])
        ran_it, ran_previous = (self._plans.slots(epoch, n_keys, evidence)[keys] == np.array(asked)).mean(axis=1)
        return float(ran_it), float(ran_previous)

    def _promised(self, promoted: list[Promotion], without_us: list[float], evidence: Evidence) -> float:
        """By how much (log) steps should be shorter with `promoted`, as calls say."""
        saved_us = 0.0
        for one in promoted:
            before, now = (evidence.find(one.state.index, setting) for setting in (one.previous, one.candidate))
            if before is not None and now is not None:
                per_call_us = math.exp(evidence.log_us(before)) - math.exp(evidence.log_us(now))
                saved_us += np.nan_to_num(per_call_us) * float(self._policy.price.traffic.per_step[one.state.index])
        step_us = float(np.median(without_us)) if without_us else math.inf
        return self._policy.price.exposed_share * saved_us / step_us

    def _roll_back(self, alarm: Alarm, step: int) -> bool:
        """Withdraw what was adopted when steps became slower; nothing, when nothing was."""
        before = [*self._guarded][: -alarm.n_steps]
        onset = (before[-1] if before else step - alarm.n_steps) - GUARD_WAITS_STEPS
        since = [one for one in self._promotions if one.since_step is not None and one.since_step >= onset]
        chains = [self._chain(first) for first in {one.state.index: one for one in reversed(since)}.values()]
        guilty = [one for one in chains if one.state.incumbent == one.candidate]
        if not guilty:
            self._guard.settled()
            return False
        self._guard.rolled_back()
        groups: dict[tuple[object, ...], list[Promotion]] = {}
        for promotion in guilty:
            groups.setdefault((promotion.state.key.collective, promotion.state.key.phase), []).append(promotion)
        self._suspects += groups.values() if len(groups) > 1 else ()
        reason = f"steps became {alarm.percent:.1f} % slower with it"
        for promotion in reversed(guilty):
            state = promotion.state
            words = f"{promotion.candidate}: {reason}"
            self._policy.end_trial(state)
            self._policy.set_incumbent(state, promotion.previous, "rollback", words)
            state.banned[promotion.candidate] = reason
            state.n_withdrawn += 1
            state.quiet_until = step + REST_STEPS * 2 ** (state.n_withdrawn - 1)
            self._report(Event(state, promotion.previous, "rollback", words))
        keys = {one.state.index for one in guilty}
        self._promotions = [
            one for one in self._promotions if one.state.index not in keys or (one.since_step or onset) < onset
        ]
        self._withdrawn = guilty
        return True

    def _chain(self, first: Promotion) -> Promotion:
        """`first` and what was promoted at its key after it, as one: from what ran before the first to the last."""
        last = [one for one in self._promotions if one.state is first.state and one.number >= first.number][-1]
        return replace(last, previous=first.previous, since_step=first.since_step)

    def _bring_back(self, promotions: list[Promotion], reason: str) -> None:
        """Withdrawn settings become incumbents again, unless their keys have moved on."""
        for promotion in promotions:
            state = promotion.state
            state.banned.pop(promotion.candidate, None)
            state.n_withdrawn -= 1
            state.quiet_until = 0
            is_offered = self._policy.outlook.fields.offers(state.family, promotion.candidate)
            if state.incumbent == promotion.previous and is_offered:
                self._policy.end_trial(state)
                self._policy.set_incumbent(state, promotion.candidate, "promote", reason)
                self.promoted(state, promotion.candidate)
                self._promotions[-1].returns = True
                self._report(Event(state, promotion.candidate, "promote", reason))
        self._withdrawn = []
