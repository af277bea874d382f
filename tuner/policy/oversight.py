"""What steps say about plans: promotions are guarded, and variants of the whole plan compete on step time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from store.records import Candidate, StepRecord
from tuner.guard import WATCH_STEPS, Alarm, Guard, steps_to_know
from tuner.policy import step_trial
from tuner.policy.admission import RISK_QUANTILE
from tuner.policy.call_savings import CallSavings, OfPlan
from tuner.policy.channel_caps import CapSearch
from tuner.policy.choice import NEVER_STEP, RETRY_STEPS, Event, Policy
from tuner.policy.evidence import Evidence
from tuner.policy.intake import Intake
from tuner.policy.pace import N_IN_A_ROW, Pace
from tuner.policy.plans import PlanBook, PlanInForce
from tuner.policy.step_gains import StepGains, steps_worth
from tuner.policy.step_trial import StepTrials, Variant
from tuner.policy.training_cost import Change, TrainingCost
from tuner.policy.trial import KeyState
from tuner.policy.variant_costs import VariantCosts

RECENT_STEPS: Final = 120
RETURN_WATCH_STEPS: Final = 20
"""How long settings that were withdrawn together are watched when they come back, one group after the other."""
GUARD_WAITS_STEPS: Final = 3
"""How many steps the measurements of a step may come after its record."""
DOUBTFUL_SHARE: Final = 0.05
"""A step that lost more of its time to exploration says nothing about promotions: what it would have taken
otherwise is not known to the percent. The budget keeps such steps few.
"""
REST_STEPS: Final = 100
"""A key whose promotion made steps slower tries nothing for so long, and for twice as long after each further time."""
MOST_LOST: Final = 0.1
"""What may slow a step down by more (log), at the 90 % bound of what is known, is not tried."""
REFRESH_STEPS: Final = 20
"""How often it is worked out anew what plans save as calls say."""


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
        self._trials = StepTrials()
        self._gains = StepGains()
        self._training_cost = TrainingCost()
        self._savings = CallSavings()
        self._of_plan: dict[int, OfPlan] = {}
        self._refresh_at_step = 0
        self._costs = VariantCosts(policy)
        self._cap_search: CapSearch | None = None
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
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)
        """Epoch and duration (us) without exploration's cost, oldest first."""

    @property
    def variant(self) -> Variant | None:
        """The variant that runs in this window."""
        return self._trials.variant if self._trials.is_on else None

    @property
    def is_comparing(self) -> bool:
        """Steps are compared: a variant is on trial or prepared, or withdrawn settings are looked into."""
        looks_into = bool(self._withdrawn or self._suspects)
        return looks_into or self._trials.variant is not None or self._cap_search is not None

    @property
    def is_busy(self) -> bool:
        """Keys may begin no trials: steps are compared, or too few are known to guard by."""
        return self.is_comparing or len(self._recent) < steps_to_know(self._gains.noise)

    def reset(self) -> None:
        """The network's regime changed: all that steps and calls said is asked for anew."""
        self.reset_yardstick()
        self._suspects, self._withdrawn = [], []

    def reset_yardstick(self) -> None:
        """Steps of before are no yardstick: variants may all be asked for anew, no watch goes on."""
        self._trials.reset()
        self._gains, self._savings = StepGains(), CallSavings()
        self._training_cost = TrainingCost()
        self._of_plan, self._refresh_at_step = {}, 0
        self._cap_search = None
        self._recent.clear()
        self._guard.settled()

    def promoted(self, state: KeyState, candidate: Candidate) -> None:
        """A key's incumbent is `candidate` from the next plan on."""
        self.n_promotions += 1
        self._promotions.append(Promotion(state, candidate, state.previous, self.n_promotions))

    def adopted(self, in_force: PlanInForce, step: int, n_keys: int, evidence: Evidence) -> None:
        """All ranks run `in_force` from `step` on."""
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
            tried_us = () if any(one.returns for one in new) else with_us
            self._guard.changed(without_us, watch_steps, tried_us, self._promised(new, without_us, evidence))

    def step_finished(self, step: StepRecord, known_step: int, states: list[KeyState], evidence: Evidence) -> bool:
        """Judge steps once their measurements are in, so that exploration's own cost can be taken off.

        True when a new plan is due at once.
        """
        is_urgent = False
        self._waiting.append(step)
        while self._waiting and (self._waiting[0].step < known_step or len(self._waiting) > GUARD_WAITS_STEPS):
            step = self._waiting.popleft()
            self._forget_extra(step.step - 2 * GUARD_WAITS_STEPS)
            in_force = self._plans.get(step.epoch)
            known_extra_us = self._intake.extra_of_step.pop(step.step, None)
            extra_us = known_extra_us or 0.0
            duration_us = max(step.duration_us - extra_us, 0.2 * step.duration_us)
            is_doubtful = extra_us > DOUBTFUL_SHARE * step.duration_us
            if known_extra_us is None and in_force is not None:
                is_doubtful = self._tries_instead(in_force)
            if not is_doubtful:
                self._recent.append((step.epoch, duration_us))
                if in_force is not None:
                    self._follow_pace(in_force, duration_us, states)
                    self._learn_gains(step, duration_us, states, evidence)
            if self._trials.variant is not None and in_force is not None:
                is_urgent |= self._judge_variant(in_force, duration_us, step.step, states, evidence)
                continue
            # Records may come long after their steps: those of before the change are not its doing.
            if is_doubtful or (self._guard.is_watching and step.step < self._watch_from_step):
                continue
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

    def consider_variants(self, states: list[KeyState], evidence: Evidence, step: int) -> None:
        """Once the keys have settled, let variants of the whole plan compete on step time."""
        trials = self._trials
        if self._policy.trials:
            self._cap_search = None
            if trials.variant is None:
                trials.postpone(step)
            return
        may_begin = self._policy.has_settled or self._cap_search is not None
        is_guarding = self._guard.is_watching or self.n_promotions > self._n_adopted
        if not may_begin or not trials.is_due(step) or is_guarding:
            return
        if self._policy.budget.remaining_us <= 0:
            return
        variant = self._best([*trials.untried(self._costs.audits(states, evidence), step)], states, evidence, step)
        if variant is None and not trials.has_capped and not self._policy.waits_for_credit:
            search = self._cap_search = self._cap_search or CapSearch(states)
            if not search.is_done:
                self._costs.advance(search, states, evidence)
            if not search.is_done:
                return
            self._cap_search = None
            untried = [*trials.untried(search.variants(), step)]
            variant = self._best(untried, states, evidence, step)
            trials.has_capped = not untried
        if variant is None:
            trials.postpone(step, RETRY_STEPS)
        else:
            trials.begin(variant, step)

    # ---- inside ---------------------------------------------------------------------------------------

    def _learn_gains(self, step: StepRecord, duration_us: float, states: list[KeyState], evidence: Evidence) -> None:
        """Let a step say what plans gain beside what calls save."""
        if step.step >= self._refresh_at_step:
            self._refresh_at_step = step.step + REFRESH_STEPS
            self._of_plan.clear()
            for name, share in self._savings.refresh(states, evidence, self._policy.rates).items():
                self._gains.changed(name, share)
        of_plan = self._of_plan.get(step.epoch)
        if of_plan is None:
            slots = self._plans.slots(step.epoch, len(states), evidence)
            of_plan = self._of_plan[step.epoch] = self._savings.of_plan(slots, evidence)
        without_us = duration_us + self._policy.exposed_share * of_plan.saved_us
        self._gains.step(math.log(without_us), {name: us / without_us for name, us in of_plan.runs_us.items()})

    def _follow_pace(self, in_force: PlanInForce, duration_us: float, states: list[KeyState]) -> None:
        """Where the same settings take another time than before, steps of before are no yardstick any more."""
        shift = self._pace.step(in_force.settings, in_force.n_changes, math.log(duration_us), self._gains.noise)
        if shift is None or not states:
            return
        newest = [*self._recent][-N_IN_A_ROW:]
        self.reset_yardstick()
        self._recent.extend(newest)
        words = f"steps take {math.exp(shift):.2f} times as long as before with the same settings: not a plan's doing"
        self._report(Event(states[0], states[0].incumbent, "keep", f"regime change: {words}"))

    def _best(self, variants: list[Variant], states: list[KeyState], evidence: Evidence, step: int) -> Variant | None:
        """The variant that is most worth a trial, of those that the budget has room for."""
        if not self._recent or self._refresh_at_step == 0:
            return None
        step_us = float(np.median([us for _, us in self._recent]))
        best, most = None, 0.0
        for variant in variants:
            worth = self._worth(variant, states, evidence, step_us, step)
            if worth > most and self._costs.fits(variant):
                best, most = variant, worth
        return best

    def _worth(self, variant: Variant, states: list[KeyState], evidence: Evidence, step_us: float, step: int) -> float:
        """What it is worth to find out whether steps are faster with it, in steps' time; 0 or less where it is not."""
        exposed = self._policy.exposed_share
        if variant.group:
            # Settings can slow computation down only while they run.
            running_us = self._savings.running_us([states[index] for index in variant.changes], evidence)
            share = min(1.0, running_us / step_us)
            side_effect, doubt = self._gains.side_effect(variant.group)
            gain = -math.log1p(exposed * max(0.0, variant.extra_us) / step_us) - share * side_effect
            doubt *= share
        else:
            self._training_cost.know_groups(self._group_shares(states, evidence, step_us))
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
            n_steps=step,
        )

    def _forget_extra(self, oldest: int) -> None:
        """What exploration added to steps that were judged long ago, or never will be."""
        extra = self._intake.extra_of_step
        while extra and (first := next(iter(extra))) < oldest:
            del extra[first]

    def _tries_instead(self, in_force: PlanInForce) -> bool:
        """Whether a plan tries something else in place of what is under watch."""
        for promotion in self._promotions:
            at, candidate = promotion.state.index, promotion.candidate
            is_tried = at < len(in_force.is_trial) and in_force.is_trial[at]
            if is_tried and promotion.state.incumbent == candidate != in_force.candidates[at]:
                return True
        return False

    def _steps_by(self, promoted: list[Promotion], n_keys: int, evidence: Evidence) -> tuple[list[float], list[float]]:
        """Recent step durations (us): of plans that ran none of `promoted`, and of those that ran all of it."""
        keys = np.array([one.state.index for one in promoted], dtype=np.int64)
        slots = np.array([evidence.slot(one.state.index, one.candidate) for one in promoted], dtype=np.int64)
        shares: dict[int, float] = {}
        without_us, with_us = [], []
        for epoch, duration_us in self._recent:
            if epoch not in shares:
                is_known = self._plans.get(epoch) is not None
                share = float((self._plans.slots(epoch, n_keys, evidence)[keys] == slots).mean()) if is_known else 0.5
                shares[epoch] = share
            if shares[epoch] == 0.0:
                without_us.append(duration_us)
            elif shares[epoch] == 1.0:
                with_us.append(duration_us)
        return without_us, with_us

    def _promised(self, promoted: list[Promotion], without_us: list[float], evidence: Evidence) -> float:
        """By how much (log) steps should be shorter with `promoted`, as calls say."""
        saved_us = 0.0
        for one in promoted:
            before, now = (evidence.find(one.state.index, setting) for setting in (one.previous, one.candidate))
            if before is not None and now is not None:
                per_call_us = math.exp(evidence.log_us(before)) - math.exp(evidence.log_us(now))
                saved_us += np.nan_to_num(per_call_us) * float(self._policy.rates[one.state.index])
        step_us = float(np.median(without_us)) if without_us else math.inf
        return self._policy.exposed_share * saved_us / step_us

    def _judge_variant(
        self, in_force: PlanInForce, duration_us: float, step: int, states: list[KeyState], evidence: Evidence
    ) -> bool:
        trials = self._trials
        if in_force.is_trial.any() or in_force.variant not in (None, trials.variant):
            return False
        extra_us, outcome = trials.step(duration_us, is_on=in_force.variant is not None)
        self._policy.budget.spend(extra_us)
        if outcome is None and self._policy.budget.remaining_us >= 0:
            return False
        trials.end(step)  # with a verdict, or because it costs more than was expected of it
        if outcome is not None:
            self._learn_cost(outcome, states, evidence)
        if outcome is not None and outcome.is_better:
            self._adopt_variant(outcome, states)
        return True

    def _group_shares(self, states: list[KeyState], evidence: Evidence, step_us: float) -> dict[str, float]:
        """By group, for what share of a step it runs."""
        groups: dict[str, list[KeyState]] = {}
        for state in states:
            groups.setdefault(step_trial.group_of(state), []).append(state)
        return {name: self._savings.running_us(members, evidence) / step_us for name, members in groups.items()}

    def _learn_cost(self, outcome: step_trial.Outcome, states: list[KeyState], evidence: Evidence) -> None:
        """Let a trial's steps say what such changes cost training."""
        changes = self._costs.measured(outcome.variant, states, evidence)
        if changes and self._recent:
            step_us = float(np.median([us for _, us in self._recent]))
            exposed_share = self._policy.exposed_share
            self._training_cost.learn(_of_step(changes, step_us), exposed_share, outcome.gain, outcome.doubt)

    def _adopt_variant(self, outcome: step_trial.Outcome, states: list[KeyState]) -> None:
        """Steps were faster with the variant: its settings become the incumbents."""
        saved = 100.0 * (1.0 - math.exp(-outcome.gain))
        reason = f"steps are {saved:.1f} % faster with {outcome.variant.name}"
        for index, candidate in outcome.variant.changes.items():
            state = states[index]
            kind = "rollback" if candidate.is_baseline else "promote"
            before = state.incumbent
            state.banned[before] = reason
            if outcome.variant.max_channels is not None:
                state.max_channels = outcome.variant.max_channels
                state.before_cap = state.before_cap or before
            elif outcome.variant.lifts_cap:
                state.banned.pop(candidate, None)
                state.max_channels, state.before_cap = 64, None
            self._policy.set_incumbent(state, candidate, kind, reason)
            # It was judged by more than its own duration; only a new regime reopens the question.
            state.quiet_until = NEVER_STEP
            self._report(Event(state, candidate, kind, reason))

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
            if state.incumbent == promotion.previous:
                self._policy.end_trial(state)
                self._policy.set_incumbent(state, promotion.candidate, "promote", reason)
                self.promoted(state, promotion.candidate)
                self._promotions[-1].returns = True
                self._report(Event(state, promotion.candidate, "promote", reason))
        self._withdrawn = []


def _of_step(by_group: Mapping[str, step_trial.GroupChange], step_us: float) -> dict[str, Change]:
    """The same as shares of a step."""
    return {
        group: Change(change.extra_us / step_us, change.released_us / step_us) for group, change in by_group.items()
    }
