"""What steps say about plans: promotions are guarded, and variants of the whole plan compete on step time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from statistics import median
from typing import Final

import numpy as np

from zerotune.store.records import StepRecord
from zerotune.tuner.learning.policy.choice import Event, Policy
from zerotune.tuner.learning.policy.evidence.attribution import Attribution
from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence
from zerotune.tuner.learning.policy.plans import PlanBook, Variant
from zerotune.tuner.learning.policy.steps.guarded_plans import GuardedPlans
from zerotune.tuner.learning.policy.steps.step_guard import N_IN_A_ROW
from zerotune.tuner.learning.policy.steps.step_kinds import StepKinds
from zerotune.tuner.learning.policy.steps.variants import ARM, Variants
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import Ints

RECENT_STEPS: Final = 120
GUARD_WAITS_STEPS: Final = 3
"""How many steps the measurements of a step may come after its record."""
DOUBTFUL_SHARE: Final = 0.05
"""A step that lost more of its time to exploration says nothing about promotions: what it would have taken
otherwise is not known to the percent. The budget keeps such steps few.
"""
KNOWN_STEPS: Final = 14
"""So many steps are known before the first trial begins."""
REST_STEPS: Final = 100
"""A key whose promotion made steps slower tries nothing for this many steps, twice as many after each further time."""


class StepFeedback:
    """Judges one job's plans by its steps.

    Args:
        policy: whose incumbents are rolled back, reinstated or replaced.
        plans: what ran under which epoch.
        attribution: knows what exploration added to each step.
        report: takes decisions.
    """

    def __init__(
        self, policy: Policy, plans: PlanBook, attribution: Attribution, report: Callable[[Event], None]
    ) -> None:
        self._policy = policy
        self._plans = plans
        self._attribution = attribution
        self._report = report
        self._kinds = StepKinds()
        self._variants = Variants(policy, plans, report)
        self._guarded = GuardedPlans(policy, plans, REST_STEPS)
        self._waiting: deque[StepRecord] = deque()
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        """Durations (us) without exploration's cost, oldest first, and what they would be without what plans save."""

    @property
    def variant(self) -> Variant | None:
        """The variant that runs in this window."""
        return self._variants.running

    @property
    def on_trial(self) -> Variant | None:
        """The variant that is compared with the plan."""
        return self._variants.on_trial

    @property
    def watched(self) -> Collection[int]:
        """Keys whose incumbent was promoted lately: steps with and without it are still compared."""
        return self._guarded.promoted

    @property
    def is_comparing(self) -> bool:
        """A variant is on trial or prepared."""
        return self._variants.is_comparing

    @property
    def leads_rest_at(self) -> Collection[int] | None:
        """While steps are compared, the keys at which nothing may run that is not proven; else None."""
        variant = self._variants.on_trial
        return None if variant is None else variant.changes.keys()

    @property
    def is_busy(self) -> bool:
        """Keys may begin no trials: steps are compared, or too few are known to guard by."""
        return self.is_comparing or self._guarded.is_asking or len(self._recent) < KNOWN_STEPS

    def reset(self) -> None:
        """The network's regime changed: all that steps and calls said is asked for anew."""
        self.reset_yardstick()
        self._guarded.reset()

    def reset_yardstick(self) -> None:
        """Steps of before are no yardstick: variants may all be asked for anew."""
        self._variants.reset()
        self._recent.clear()

    def enqueued(self, steps: Ints, message_bytes: Ints) -> None:
        """Calls of rank 0, shape [n] each: the steps in which they were enqueued and what they move."""
        self._kinds.enqueued(steps, message_bytes)

    def step_finished(self, step: StepRecord, known_step: int, states: list[KeyState], evidence: CallEvidence) -> bool:
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

    def consider_variants(self, states: list[KeyState], evidence: CallEvidence, step: int) -> None:
        """Once the keys have settled, let variants of the whole plan compete on step time.

        Args:
            states: of all keys, by key index.
            evidence: of the regime in force.
            step: the newest step.
        """
        step_us = float(np.median([us for us, _ in self._recent])) if self._recent else math.inf
        is_guarding = bool(self._guarded.promoted) or self._guarded.is_asking
        self._variants.consider(states, evidence, step, step_us, self._guarded.effects, may_begin=not is_guarding)

    def give_up(self, variant: Variant, ratio: float, states: list[KeyState], step: int) -> None:
        """End the trial of a variant some of whose calls are catastrophically slow; steps need not show it, too.

        Args:
            variant: on trial.
            ratio: times as long as what usually runs.
            states: of all keys, by key index.
            step: the newest step.
        """
        self._variants.give_up(variant, ratio, states, step, self._guarded.effects)

    # ---- inside ---------------------------------------------------------------------------------------

    def _judge(self, step: StepRecord, states: list[KeyState], evidence: CallEvidence) -> bool:
        """One step of which all is known that will be; true when a new plan is due at once."""
        self._forget_extra(step.step - 2 * GUARD_WAITS_STEPS)
        in_force = self._plans.get(step.epoch)
        known_extra_us = self._attribution.extra_of_step.pop(step.step, None)
        extra_us = known_extra_us or 0.0
        without_extra_us = max(step.duration_us - extra_us, 0.2 * step.duration_us)
        duration_us = self._kinds.usual_us(step.step, without_extra_us)
        if duration_us is None:
            return False
        is_doubtful = extra_us > DOUBTFUL_SHARE * step.duration_us
        is_doubtful |= self._attribution.connections.finished(step.step, duration_us, [us for us, _ in self._recent])
        if in_force is None:
            return False
        unsaved_us = duration_us + self._variants.saved_us(step.epoch, states, evidence)
        unsaved_shift = math.log(unsaved_us / median(us for _, us in self._recent)) if self._recent else 0.0
        if not is_doubtful:
            self._recent.append((duration_us, unsaved_us))
            noise = self._guarded.effects.noise
            self._variants.learn(step.epoch, step.step, duration_us, noise, states, evidence)
        is_on_trial = self._variants.on_trial is not None
        if in_force.variant not in (None, self._variants.on_trial):
            self._variants.charge_late()
            return False
        shown = self._guarded.shown
        as_usual = duration_us / without_extra_us
        shift = self._guarded.step(
            in_force,
            step.step,
            as_usual * step.duration_us,
            states,
            evidence,
            unsaved_shift,
            arm=ARM if is_on_trial else None,
        )
        if is_on_trial:
            return self._variants.judge(in_force, step.step, duration_us, self._guarded.effects, states)
        if shift is not None and states:
            self._pace_changed(shift, step.step, states)
        return shown != self._guarded.shown

    def _pace_changed(self, shift: float, step: int, states: list[KeyState]) -> None:
        """Steps of before are no yardstick any more."""
        newest = [*self._recent][-N_IN_A_ROW:]
        self.reset_yardstick()
        self._recent.extend(newest)
        words = f"training's own pace changed: steps take {math.exp(shift):.2f} times as long with the same settings"
        self._report(Event(states[0], states[0].incumbent, "pace", words, step))

    def _forget_extra(self, oldest: int) -> None:
        """What exploration added to steps that were judged long ago, or never will be."""
        extra = self._attribution.extra_of_step
        while extra and (first := next(iter(extra))) < oldest:
            del extra[first]

    def _explores_nothing(self, epoch: int) -> bool:
        """Whether a step with that plan lost nothing to exploration, whatever its measurements will say."""
        in_force = self._plans.get(epoch)
        n_keys = len(self._policy.price.traffic.per_step)
        return in_force is not None and not in_force.is_trial.any() and not self._policy.verified(n_keys).any()
