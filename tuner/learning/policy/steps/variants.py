"""Variants of the whole plan: which one is worth a trial, how it went, and what is learned from that.

What other settings would do to training is only seen in its steps. `step_trial` runs one variant against the plan,
`step_gains` and `training_cost` say what may come of it, `channel_caps` prepares those with fewer channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import numpy as np

from zerotune.store.records import StepRecord
from zerotune.tuner.learning.policy.choice import NEVER_STEP, RETRY_STEPS, Event, Policy
from zerotune.tuner.learning.policy.evidence.call_savings import CallSavings, OfPlan
from zerotune.tuner.learning.policy.evidence.evidence import Evidence
from zerotune.tuner.learning.policy.gain_texts import Z_90, comparison
from zerotune.tuner.learning.policy.plans import PlanBook, PlanInForce
from zerotune.tuner.learning.policy.steps import step_trial
from zerotune.tuner.learning.policy.steps.channel_caps import CapSearch
from zerotune.tuner.learning.policy.steps.step_gains import StepGains, steps_worth
from zerotune.tuner.learning.policy.steps.step_trial import StepTrials, Variant
from zerotune.tuner.learning.policy.steps.variant_costs import VariantCosts
from zerotune.tuner.learning.policy.trials.admission import RISK_QUANTILE, unpaid_steps
from zerotune.tuner.learning.policy.trials.training_cost import Change, TrainingCost
from zerotune.tuner.learning.policy.trials.trial import KeyState

MOST_LOST: Final = 0.1
"""What may slow a step down by more (log), at the 90 % bound of what is known, is not tried."""
MOST_SHARE: Final = 10.0
"""Where calls of a group take more of a step, what was recorded of them or of the step was no measurement."""
UNPAID_SHARE: Final = 0.25
"""While no gains pay for exploration, a plan must pay within this share of the steps that a trial of one key has: it
runs longer before steps show its effect, and concerns all of its keys at once.
"""
REFRESH_STEPS: Final = 20
"""How often it is worked out anew what plans save as calls say."""


class Variants:
    """One job's variants; `learn` every step, `consider` when a plan is made, `judge` while one is on trial.

    Args:
        policy: whose incumbents are replaced.
        plans: what ran under which epoch.
        report: takes decisions.
    """

    def __init__(self, policy: Policy, plans: PlanBook, report: Callable[[Event], None]) -> None:
        self._policy = policy
        self._plans = plans
        self._report = report
        self._trials = StepTrials()
        self._gains = StepGains()
        self._spent_us = 0.0
        """What the variant on trial has cost."""
        self._costs = VariantCosts(policy)
        self.reset()

    @property
    def running(self) -> Variant | None:
        """The variant that runs in this window."""
        return self._trials.variant if self._trials.is_on else None

    @property
    def is_on_trial(self) -> bool:
        """A variant is compared with the plan."""
        return self._trials.variant is not None

    @property
    def is_comparing(self) -> bool:
        """A variant is on trial, or prepared."""
        return self.is_on_trial or self._cap_search is not None

    @property
    def changed_keys(self) -> Collection[int] | None:
        """What the variant on trial changes; None if there is none."""
        variant = self._trials.variant
        return None if variant is None else variant.changes.keys()

    @property
    def noise(self) -> float:
        """Standard deviation (log) of a step around what was expected of it."""
        return self._gains.noise

    def reset(self) -> None:
        """Steps of before are no yardstick: all may be asked for anew."""
        self._trials.reset()
        self._gains, self._savings = StepGains(self._gains.noise), CallSavings()
        self._training_cost = TrainingCost()
        self._of_plan: dict[int, OfPlan] = {}
        self._refresh_at_step = 0
        self._step_us = math.inf
        self._cap_search: CapSearch | None = None
        self._search_at_step = 0
        """Until then there is no other plan that was not tried lately."""

    def learn(self, step: StepRecord, duration_us: float, states: Sequence[KeyState], evidence: Evidence) -> None:
        """Learn from a step what plans gain beside what calls save.

        Args:
            step: its record.
            duration_us: without exploration's cost.
            states: of all keys, by key index.
            evidence: of the regime in force.
        """
        if step.step >= self._refresh_at_step:
            self._refresh_at_step = step.step + REFRESH_STEPS
            self._of_plan.clear()
            for name, share in self._savings.refresh(states, evidence, self._policy.price.traffic.per_step).items():
                self._gains.changed(name, share)
        of_plan = self._of_plan.get(step.epoch)
        if of_plan is None:
            slots = self._plans.slots(step.epoch, len(states), evidence)
            of_plan = self._of_plan[step.epoch] = self._savings.of_plan(slots, evidence)
        without_us = duration_us + self._policy.price.exposed_share * of_plan.saved_us
        shares = {name: us / without_us for name, us in of_plan.runs_us.items()}
        if without_us < math.inf and all(share <= MOST_SHARE for share in shares.values()):
            self._gains.step(math.log(without_us), shares)

    def saved_us(self, epoch: int, n_keys: int, evidence: Evidence) -> float:
        """What a plan saves of a step against NCCL's own choices, according to calls measured by now.

        Args:
            epoch: of the plan.
            n_keys: keys known now.
            evidence: of the regime in force.

        Returns:
            Microseconds per step.
        """
        slots = self._plans.slots(epoch, n_keys, evidence)
        return self._policy.price.exposed_share * self._savings.of_plan(slots, evidence).saved_us

    def consider(
        self, states: list[KeyState], evidence: Evidence, step: int, step_us: float, *, may_begin: bool
    ) -> None:
        """Once the keys have settled, begin the variant that is most worth it, if any is.

        Args:
            states: all keys.
            evidence: what calls took.
            step: the newest step.
            step_us: the usual step time; infinite where it is not known.
            may_begin: no promotion is under watch.
        """
        trials = self._trials
        self._step_us = step_us
        if trials.variant is not None and not self._costs.may_run(trials.variant, states):
            trials.end(step)  # there is no memory for it any more
        if self._policy.trials:
            self._cap_search = None
            if trials.variant is None:
                trials.postpone(step)
            return
        has_settled = self._policy.has_settled or self._cap_search is not None
        if not (may_begin and has_settled and trials.is_due(step)) or self._policy.budget.remaining_us <= 0:
            return
        variant = self._best([*trials.untried(self._costs.audits(states, evidence), step)], states, evidence, step)
        if variant is None and step >= self._search_at_step and not self._policy.options.waits_for_credit:
            search = self._cap_search = self._cap_search or CapSearch(states)
            if not search.is_done:
                self._costs.advance(search, states, evidence, self._training_cost)
            if not search.is_done:
                return
            self._cap_search = None
            untried = [*trials.untried(search.variants(), step)]
            variant = self._best(untried, states, evidence, step)
            if not untried:
                self._search_at_step = step + step_trial.CAP_EVERY_STEPS
        if variant is None:
            trials.postpone(step, RETRY_STEPS)
        else:
            trials.begin(variant, step, self.noise, step_us)
            self._spent_us = 0.0

    def judge(
        self, in_force: PlanInForce, duration_us: float, step: int, states: list[KeyState], evidence: Evidence
    ) -> bool:
        """Take in one step while a variant is on trial.

        Args:
            in_force: plan of the step.
            duration_us: without exploration's cost.
            step: its number.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            True when a new plan is due at once.
        """
        trials = self._trials
        if in_force.variant not in (None, trials.variant) or self._explores_more(in_force, states):
            return False
        extra_us, outcome = trials.step(duration_us, is_on=in_force.variant is not None)
        self._policy.budget.spend(extra_us)
        self._spent_us += extra_us
        if not self._policy.may_promote:
            outcome = None  # the network changes just now: what steps take by that is no variant's doing
        if outcome is None and self._policy.budget.remaining_us >= 0:
            return False
        if trials.variant is not None:
            state, words = states[min(trials.variant.changes)], compared(trials.variant, outcome, self._spent_us)
            self._report(Event(state, state.incumbent, "variant", words, step))
        # With a verdict, or because it costs more than was expected of it.
        trials.end(step, for_good=outcome is None or outcome.is_hopeless)
        if outcome is not None:
            self._learn_cost(outcome, states, evidence)
        if outcome is not None and outcome.is_better:
            self._adopt(outcome, states)
        return True

    def give_up(self, variant: Variant, ratio: float, states: list[KeyState], step: int) -> None:
        """End a variant's trial at once, if it is on trial. It may come back without these settings.

        Args:
            variant: some of whose calls are too slow.
            ratio: times as long as usual.
            states: of all keys, by key index.
            step: the newest step.
        """
        if variant == self._trials.variant:
            state, words = states[min(variant.changes)], given_up(variant, ratio)
            self._report(Event(state, state.incumbent, "variant", words, step))
            self._trials.end(step)

    def charge_late(self, duration_us: float) -> None:
        """One step of a variant whose trial has ended, as the next plan is still on its way."""
        self._policy.budget.spend(self._trials.late_us(duration_us))

    # ---- inside ---------------------------------------------------------------------------------------

    def _explores_more(self, in_force: PlanInForce, states: list[KeyState]) -> bool:
        """Whether a plan runs what is not proven beside the leads that run on while steps are compared."""
        changed = self.changed_keys or ()
        explored = np.flatnonzero(in_force.is_trial).tolist()
        return any(at in changed or in_force.candidates[at] != states[at].lead for at in explored)

    def _best(self, variants: list[Variant], states: list[KeyState], evidence: Evidence, step: int) -> Variant | None:
        """The variant that is most worth a trial, of those that the budget has room for."""
        if not math.isfinite(self._step_us) or self._refresh_at_step == 0:
            return None
        best, most = None, 0.0
        for variant in variants:
            worth = self._worth(variant, states, evidence, step)
            if worth > most and self._costs.fits(variant, evidence) and self._costs.may_run(variant, states):
                best, most = variant, worth
        return best

    def _worth(self, variant: Variant, states: list[KeyState], evidence: Evidence, step: int) -> float:
        """What it is worth to find out whether steps are faster with it, in steps' time; 0 or less where it is not."""
        exposed, step_us = self._policy.price.exposed_share, self._step_us
        if variant.group:
            # Settings can slow computation down only while they run.
            running_us = self._savings.running_us([states[index] for index in variant.changes], evidence)
            share = min(1.0, running_us / step_us)
            side_effect, doubt = self._gains.side_effect(variant.group)
            gain = -math.log1p(exposed * max(0.0, variant.extra_us) / step_us) - share * side_effect
            doubt *= share
        else:
            self._training_cost.know_groups(self._group_shares(states, evidence))
            gain, doubt = self._training_cost.expected(_of_step(variant.by_group, step_us), exposed)
            doubt = math.hypot(doubt, exposed * max(0.0, variant.risk_us - variant.extra_us) / RISK_QUANTILE / step_us)
            if gain - RISK_QUANTILE * doubt < -MOST_LOST:
                return 0.0
        return steps_worth(
            gain,
            max(doubt, 1e-6),
            least=step_trial.MIN_STEP_GAIN,
            noise=self._gains.noise,
            most_units=step_trial.MAX_UNITS,
            n_steps=step if self._policy.budget.is_paid else min(step, int(UNPAID_SHARE * unpaid_steps(step))),
        )

    def _group_shares(self, states: list[KeyState], evidence: Evidence) -> dict[str, float]:
        """By group, for what share of a step it runs."""
        groups: dict[str, list[KeyState]] = {}
        for state in states:
            groups.setdefault(step_trial.group_of(state), []).append(state)
        return {name: self._savings.running_us(members, evidence) / self._step_us for name, members in groups.items()}

    def _learn_cost(self, outcome: step_trial.VariantResult, states: list[KeyState], evidence: Evidence) -> None:
        """Let a trial's steps say what such changes cost training."""
        changes = _of_step(self._costs.measured(outcome.variant, states, evidence), self._step_us)
        if changes:
            self._training_cost.learn(changes, self._policy.price.exposed_share, outcome.gain, outcome.doubt)

    def _adopt(self, outcome: step_trial.VariantResult, states: list[KeyState]) -> None:
        """Steps were faster with the variant: its settings become the incumbents."""
        saved = 100.0 * (1.0 - math.exp(-outcome.gain))
        reason = f"steps are {saved:.1f} % faster with {outcome.variant.name}"
        for index, candidate in outcome.variant.changes.items():
            state = states[index]
            kind = "rollback" if candidate.is_baseline else "promote"
            before = state.incumbent
            state.banned[before] = f"given up: {reason}"
            if not outcome.variant.is_audit:
                state.max_channels = outcome.variant.max_channels or candidate.n_channels
                state.before_cap = state.before_cap or before
            elif outcome.variant.lifts_cap:
                state.banned.pop(candidate, None)
                state.lift_cap()
            self._policy.set_incumbent(state, candidate, kind, reason)
            # It was judged by more than its own duration: only a new regime reopens the question, but where nothing was
            # tried yet, what the cap leaves is.
            if state.n_tried:
                state.quiet_until = NEVER_STEP
            self._report(Event(state, candidate, kind, reason))


def compared(variant: Variant, outcome: step_trial.VariantResult | None, spent_us: float) -> str:
    """How the trial of a variant ended, in words.

    Args:
        variant: that was on trial.
        outcome: the comparison; None: ended without a verdict.
        spent_us: what the trial cost.

    Returns:
        The reason for a decision.
    """
    if outcome is None:
        verdict = "given up without a verdict: it cost more than was expected"
    else:
        unsure = 100.0 * Z_90 * outcome.doubt
        verdict = f"steps were {comparison(outcome.gain)} with it (90 %: give or take {unsure:.1f})"
        verdict += ", so it runs now" if outcome.is_better else ", so it does not run"
    return f"another plan on trial, {variant.name}: {verdict}; that cost {spent_us:,.0f} us"


def given_up(variant: Variant, ratio: float) -> str:
    """How the trial of a variant ended that calls spoke against, in words."""
    return f"another plan on trial, {variant.name}: given up, as calls took up to {ratio:.1f} times as long with it"


def _of_step(by_group: Mapping[str, step_trial.GroupChange], step_us: float) -> dict[str, Change]:
    """The same as shares of a step."""
    return {
        group: Change(change.extra_us / step_us, change.released_us / step_us) for group, change in by_group.items()
    }
