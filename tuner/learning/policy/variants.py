"""Variants of the plan that may train faster although no collective alone is: arms of the step guard's regression.

Under overlap a collective is not worth its own microseconds, and its channels hold multiprocessors that computation
lacks. So once the keys have settled, plans with fewer channels take turns with the plan in force, in an order drawn by
chance: what that does to steps is one more effect in the guard's filter. A variant caps the channels of all keys or of
one group; or it gives each key what costs training least by what steps have told of calls and channels so far
(`TrainingModel`), which also says what a variant may be worth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Final

import numpy as np

from zerotune.agent.nccl.catalog import CHANNEL_LADDER
from zerotune.store.records import Candidate
from zerotune.tuner.learning.policy.acquisition import Z_90, comparison, expected_gain, saved
from zerotune.tuner.learning.policy.choice import NEVER_STEP, RETRY_STEPS, Event, Policy
from zerotune.tuner.learning.policy.keys import KeyState
from zerotune.tuner.learning.policy.observations import CallEvidence
from zerotune.tuner.learning.policy.plans import PlanBook, PlanInForce, Variant
from zerotune.tuner.learning.policy.step_effects import Load, PlanLoads, StepEffects, TrainingModel, group_of
from zerotune.tuner.modeling.features import cell_of

RISK_QUANTILE: Final = 1.3
ALL_EXPOSED: Final = 0.95
"""Share of communication that computation waits for, above which nothing is taken to hide."""
SETTLED_STEPS: Final = 20
"""Steps without a trial before variants begin, and between them: while keys settle, they would only disturb."""
AGAIN_AFTER_STEPS: Final = 200
"""Between two trials of one variant, since one may have been unlucky; twice as many after each."""
REFRESH_STEPS: Final = 20
"""How often it is worked out anew what plans load steps with."""
KEYS_PER_CALL: Final = 12
"""Keys whose settings are looked for when a plan is made: that takes their posteriors."""
MOST_AT_ONCE: Final = 3
"""By no more than this factor are channels reduced in one go: one cap says little of a far lower one."""
FITTED: Final = 0
"""In place of a cap: what costs training least by what is known of calls and channels."""
MOST_LOST: Final = 0.1
"""What may slow a step down by more (log), at the 90 % bound of what is known, is not tried."""
MOST_AT_RISK: Final = 0.5
"""Share of the remaining budget that a variant may put at risk."""
FEW_STEPS: Final = 4.0
"""Where what runs can be withdrawn within this many steps, variants may run settings that were never measured."""
LEAST_GAIN: Final = 0.002
"""Less (log) is not taken."""
WINDOW_STEPS: Final = 2
MOST_STEPS: Final = 96
"""Steps with a variant after which it has been tried long enough."""
ADOPTED: Final = 3.3
"""Standard deviations by which steps must be faster: as for what the guard withdraws."""
REJECTED: Final = 1.3
HOPELESS: Final = 2.6
"""With fewer of them left to `LEAST_GAIN` a trial ends, and the variant does not come back."""
ARM: Final = 1 << 40
"""Name of the variant in the regression: no slot has it."""


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
        self._chance = random.Random(0)
        self.reset()

    @property
    def running(self) -> Variant | None:
        """The variant that runs in this window."""
        return self.on_trial if self._is_on else None

    @property
    def is_comparing(self) -> bool:
        """A variant is on trial, or looked for."""
        return self.on_trial is not None or self._search is not None

    def returns_at(self, name: str) -> int:
        """The step before which a variant does not come back."""
        return self._tried.get(name, (0, 0))[0]

    def reset(self) -> None:
        """Steps of before are no yardstick: all may be asked for anew."""
        self.model, self._loads = TrainingModel(), PlanLoads()
        self._of_plan: dict[int, tuple[float, dict[str, Load]]] = {}
        self._refresh_at_step = 0
        self.on_trial: Variant | None = None
        """Compared with the plan."""
        self._is_on = self._is_second = False
        """It runs in this window; the window ends a pair, one with the variant and one without, in either order."""
        self._steps_in_window = 0
        self._on_us: list[float] = []
        """Durations of its steps."""
        self._n_off = 0
        self._usual_us = math.inf
        self._charged_us = 0.0
        """What the variant on trial has cost."""
        self._per_step_us = 0.0
        """What a step with the last variant costs."""
        self._tried: dict[str, tuple[int, int]] = {}
        """By name, the step before which it does not come back, and how often it was tried."""
        self._found: dict[int, dict[KeyState, Candidate]] = {}
        self._search: Iterator[None] | None = None
        self._next_at_step = 0

    def learn(
        self, epoch: int, step: int, duration_us: float, noise: float, states: list[KeyState], evidence: CallEvidence
    ) -> None:
        """Learn from a step what calls and channels cost training.

        Args:
            epoch: of its plan.
            step: its number.
            duration_us: without exploration's cost.
            noise: standard deviation of a step (log).
            states: of all keys, by key index.
            evidence: of the regime in force.
        """
        if step >= self._refresh_at_step:
            self._refresh_at_step = step + REFRESH_STEPS
            self._of_plan.clear()
            self._loads.refresh(states, evidence, self._policy.price.traffic.per_step)
        loads = self._plan_loads(epoch, states, evidence)[1]
        if all(abs(load.calls_us) < duration_us for load in loads.values()):  # else something was no measurement
            self.model.step(duration_us, loads, self._policy.price.exposed_share, noise)

    def saved_us(self, epoch: int, states: list[KeyState], evidence: CallEvidence) -> float:
        """What a plan saves of a step against NCCL's own choices.

        Args:
            epoch: of the plan.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            Microseconds, according to calls.
        """
        return self._policy.price.exposed_share * self._plan_loads(epoch, states, evidence)[0]

    def consider(
        self,
        states: list[KeyState],
        evidence: CallEvidence,
        step: int,
        step_us: float,
        effects: StepEffects,
        *,
        may_begin: bool,
    ) -> None:
        """Once the keys have settled, begin the variant that is most worth it, if any is.

        Args:
            states: all keys.
            evidence: what calls took.
            step: the newest step.
            step_us: the usual step time; infinite where it is not known.
            effects: the guard's regression.
            may_begin: no promotion is under watch.
        """
        if self.on_trial is not None and not self.may_run(self.on_trial, states):
            self._end(step, effects)  # there is no memory for it any more
        if self._policy.trials:
            self._search = None
            self._next_at_step = max(self._next_at_step, step + SETTLED_STEPS)
            return
        has_settled = self._policy.has_settled or self._search is not None
        may_begin = may_begin and has_settled and self.on_trial is None and step >= self._next_at_step
        is_known = math.isfinite(step_us) and self._refresh_at_step > 0
        if not (may_begin and is_known) or self._policy.budget.remaining_us <= 0:
            return
        if self._policy.price.exposed_share > ALL_EXPOSED:
            return  # channels take nothing from computation where none runs beside them
        if self._search is None:
            self._search = self._look_for_settings(states, evidence, step_us)
        if next(self._search, True) is None:
            return
        self._search = None
        best, most = None, 0.0
        for variant in self._variants(states, evidence, step_us):
            if step < self.returns_at(variant.name) or not self._fits(variant, evidence):
                continue
            worth = self._worth(variant, step, step_us, effects.noise)
            if worth > most and self.may_run(variant, states):
                best, most = variant, worth
        self._next_at_step = step + (SETTLED_STEPS if best is not None else RETRY_STEPS * SETTLED_STEPS)
        if best is not None:
            self.begin(best, step, step_us, effects)

    def begin(self, variant: Variant, step: int, step_us: float, effects: StepEffects) -> None:
        """Start alternating a variant with the plan itself.

        Args:
            variant: to try.
            step: the newest step.
            step_us: of the steps before.
            effects: the guard's regression.
        """
        self.on_trial, self._usual_us, self._charged_us = variant, step_us, 0.0
        self._on_us, self._n_off = [], 0
        n_times = self._tried.get(variant.name, (0, 0))[1]
        self._tried[variant.name] = step + AGAIN_AFTER_STEPS * 2**n_times, n_times + 1
        effects.know(ARM, MOST_LOST / RISK_QUANTILE)
        self._begin_pair()

    def judge(
        self, in_force: PlanInForce, step: int, duration_us: float, effects: StepEffects, states: list[KeyState]
    ) -> bool:
        """Look at the regression after a step while a variant is on trial.

        Args:
            in_force: plan of the step.
            step: its number.
            duration_us: without exploration's cost.
            effects: the guard's regression, after the step.
            states: of all keys, by key index.

        Returns:
            True when a new plan is due at once.
        """
        variant, is_on = self.on_trial, in_force.variant is not None
        if variant is None or in_force.variant not in (None, variant):
            return False
        if is_on:
            self._on_us.append(duration_us)
            self._charge()
        else:
            self._n_off += 1
        self._alternate(is_on)
        n_on = len(self._on_us)
        slowdown, doubt = effects.effect({ARM: 1.0})
        gain = -slowdown
        is_better = gain > max(ADOPTED * doubt, LEAST_GAIN)
        is_over = gain + REJECTED * doubt < LEAST_GAIN or n_on >= MOST_STEPS
        has_verdict = min(n_on, self._n_off) >= WINDOW_STEPS and (is_better or is_over)
        if not (has_verdict and self._policy.may_promote) and self._policy.budget.remaining_us >= 0:
            return False  # where the network changes just now, what steps take by that is no variant's doing
        words = "given up without a verdict: it cost more than was expected"
        if has_verdict:
            words = f"steps were {comparison(gain)} with it (90 %: give or take {100.0 * Z_90 * doubt:.1f}), so it "
            words += "runs now" if is_better else "does not run"
        self._tell(variant, f"{words}; that cost {self._charged_us:,.0f} us", states, step)
        if not has_verdict or gain + HOPELESS * doubt < LEAST_GAIN:
            self._tried[variant.name] = NEVER_STEP, 0
        self._end(step, effects)
        if has_verdict and is_better:
            self._adopt(variant, gain, states)
        return True

    def give_up(self, variant: Variant, ratio: float, states: list[KeyState], step: int, effects: StepEffects) -> None:
        """End a variant's trial at once, if it is on trial. It may come back without these settings.

        Args:
            variant: some of whose calls are too slow.
            ratio: times as long as usual.
            states: of all keys, by key index.
            step: the newest step.
            effects: the guard's regression.
        """
        if variant == self.on_trial:
            self._tell(variant, f"given up, as calls took up to {ratio:.1f} times as long with it", states, step)
            self._end(step, effects)

    def charge_late(self) -> None:
        """One step of a variant whose trial has ended, as the next plan is still on its way."""
        self._policy.budget.spend(self._per_step_us)

    def may_run(self, variant: Variant, states: list[KeyState]) -> bool:
        """Whether device memory allows all of a variant."""
        settings = {
            (self._policy.options.what_runs(states[index], candidate), states[index].key.communicator)
            for index, candidate in variant.changes.items()
        }
        return self._policy.memory.allows_all(settings)

    # ---- inside ---------------------------------------------------------------------------------------

    def _plan_loads(self, epoch: int, states: list[KeyState], evidence: CallEvidence) -> tuple[float, dict[str, Load]]:
        if epoch not in self._of_plan:
            slots = self._plans.slots(epoch, len(states), evidence)
            self._of_plan[epoch] = self._loads.of_plan(slots, states, evidence)
        return self._of_plan[epoch]

    def _look_for_settings(self, states: list[KeyState], evidence: CallEvidence, step_us: float) -> Iterator[None]:
        """Find what every key would run under each cap on channels, a few keys at a time."""
        running_us = self._loads.running_us(states, evidence)
        self.model.know_groups({name: us / step_us for name, us in running_us.items()})
        most = max((state.n_channels for state in states), default=0)
        self._found = {cap: {} for cap in (FITTED, *CHANNEL_LADDER) if cap < most <= MOST_AT_ONCE * (cap or most)}
        for n_looked_at, state in enumerate([*states], start=1):
            if state.n_channels and group_of(state) in running_us:
                for cap, candidate in self._cheapest(state, states, evidence):
                    self._found[cap][state] = candidate
            if n_looked_at % KEYS_PER_CALL == 0:
                yield

    def _cheapest(
        self, state: KeyState, states: list[KeyState], evidence: CallEvidence
    ) -> Iterator[tuple[int, Candidate]]:
        """What a key would run under each cap that its incumbent is above, and fitted."""
        incumbent = evidence.find(state.index, state.incumbent)
        if incumbent is None or not math.isfinite(evidence.log_us(incumbent)):
            return
        options = self._policy.surrogate.fields.of(state).options
        mean, spread = state.opinion or self._policy.surrogate.posterior(state, evidence)
        channels = np.array([state.channels_of(option) for option in options])
        now_us = math.exp(evidence.log_us(incumbent))
        # What takes so long passes for a catastrophe.
        may_run = (channels > 0) & (mean < math.log(now_us * self._policy.settings.catastrophic_ratio))
        # Of many guesses the lowest is too low: a doubt counts against it, but where only channels differ.
        runs = cell_of(state.default_setting or state.incumbent if state.incumbent.is_baseline else state.incumbent)
        doubts = np.where([cell_of(option) == runs for option in options], 0.0, spread)
        us = np.exp(np.where(may_run, mean + doubts, 700.0))
        exposure, toll, doubt = self.model.of_group(group_of(state), self._policy.price.exposed_share)
        for cap in self._found:
            costs_us, most_us = np.where(channels <= cap, us, np.inf), np.inf
            if cap == FITTED:
                costs_us, most_us = us * (exposure + toll * channels), now_us * (exposure + toll * state.n_channels)
            if not 0 < cap < state.n_channels and not (cap == FITTED and toll > doubt):
                continue
            for at in np.argsort(costs_us).tolist():
                if not (may_run[at] and costs_us[at] < most_us):
                    break
                if options[at] not in state.banned and self._policy.options.may_run(state, options[at]):
                    if options[at] != state.incumbent:
                        yield cap, options[at]
                    break

    def _variants(self, states: Sequence[KeyState], evidence: CallEvidence, step_us: float) -> Iterator[Variant]:
        """Those of all keys, and of each group alone: what is waited for wants other settings than what hides."""
        groups = sorted({group_of(state) for found in self._found.values() for state in found})
        for group in ["", *(groups if len(groups) > 1 else ())]:
            for found in self._found.values():
                changes = {state.index: one for state, one in found.items() if not group or group_of(state) == group}
                if changes:
                    most = max(states[index].channels_of(one) for index, one in changes.items())
                    name = f"at most {most} channels{group and ' for '}{group}"
                    yield Variant(name, changes, *self._more(changes, states))

    def _more(
        self, changes: Mapping[int, Candidate], states: Sequence[KeyState]
    ) -> tuple[dict[str, Load], float]:
        """What a variant loads steps with beyond what runs, by group, and what it may cost them at worst (us)."""
        loads: dict[str, Load] = {}
        worst_us = 0.0
        for index, candidate in changes.items():
            state = states[index]
            options = self._policy.surrogate.fields.of(state).options
            if state.opinion is None or not {candidate, state.incumbent} <= {*options}:
                continue
            at = [options.index(one) for one in (candidate, state.incumbent)]
            mean, spread = (opinion[at] for opinion in state.opinion)
            then_us, now_us = np.exp(mean)
            rate = float(self._policy.price.traffic.per_step[index])
            before = loads.get(group_of(state), Load())
            held_us = state.channels_of(candidate) * then_us - state.n_channels * now_us
            loads[group_of(state)] = Load(
                before.calls_us + rate * float(then_us - now_us), before.held_us + rate * float(held_us)
            )
            worst_us += rate * max(0.0, float(then_us * math.exp(RISK_QUANTILE * spread[0]) - now_us))
        return loads, worst_us

    def _fits(self, variant: Variant, evidence: CallEvidence) -> bool:
        """Whether the budget has room for a variant; never for what nobody has measured, where that runs for long."""
        price = self._policy.price
        is_short = price.steps_at_risk <= FEW_STEPS
        is_known = is_short or all(evidence.has_measured(index, one) for index, one in variant.changes.items())
        room_us = MOST_AT_RISK * max(0.0, self._policy.budget.remaining_us)
        return is_known and variant.worst_us * 2.0 * price.steps_at_risk * price.charged_share <= room_us

    def _worth(self, variant: Variant, step: int, step_us: float, noise: float) -> float:
        """What it is worth to try it, in steps' time: what may be gained by it later, less what it costs to see."""
        exposed = self._policy.price.exposed_share
        gain, doubt = self.model.expected(variant.loads, step_us, exposed)
        more_us = sum(load.calls_us for load in variant.loads.values())
        doubt = math.hypot(doubt, exposed * max(0.0, variant.worst_us - more_us) / RISK_QUANTILE / step_us, 1e-6)
        if gain - RISK_QUANTILE * doubt < -MOST_LOST:
            return 0.0
        loss = max(0.0, -gain)
        n_needed = 2.0 * (REJECTED * noise / loss) ** 2 if loss else math.inf
        return step * expected_gain(gain - LEAST_GAIN, doubt) - loss * min(max(n_needed, 2.0), MOST_STEPS)

    def _charge(self) -> None:
        """What steps with the variant took longer, by their median: a checkpoint is not its doing."""
        typical_us = median_low(self._on_us)
        if len(self._on_us) == 1:
            typical_us = min(typical_us, self._policy.settings.catastrophic_ratio * self._usual_us)
        self._per_step_us = max(0.0, typical_us - self._usual_us)
        cost_us = len(self._on_us) * self._per_step_us
        self._policy.budget.spend(cost_us - self._charged_us)
        self._charged_us = cost_us

    def _alternate(self, is_on: bool) -> None:
        if is_on is not self._is_on:
            return  # the window's plan is not in force yet
        self._steps_in_window += 1
        if self._steps_in_window < WINDOW_STEPS:
            return
        if self._is_second:
            self._begin_pair()
        else:
            self._is_on, self._is_second, self._steps_in_window = not self._is_on, True, 0

    def _begin_pair(self) -> None:
        """By chance, as training has periods of its own: each fourth step, a longer one, would be on one side."""
        self._is_on = self._chance.random() < 0.5
        self._is_second, self._steps_in_window = False, 0

    def _end(self, step: int, effects: StepEffects) -> None:
        """Back to the plan itself."""
        effects.forget([ARM])
        self.on_trial, self._is_on = None, False
        self._next_at_step = step + SETTLED_STEPS

    def _tell(self, variant: Variant, words: str, states: list[KeyState], step: int) -> None:
        state = states[min(variant.changes)]
        words = f"another plan on trial, {variant.name}: {words}"
        self._report(Event(state, state.incumbent, "variant", words, step))

    def _adopt(self, variant: Variant, gain: float, states: list[KeyState]) -> None:
        """Steps were faster with the variant: its settings become the incumbents."""
        reason = f"steps are {saved(gain)} faster with {variant.name}"
        for index, candidate in variant.changes.items():
            state = states[index]
            state.max_channels = state.channels_of(candidate)
            if state.n_channels <= state.max_channels:
                state.banned[state.incumbent] = f"given up: {reason}"
            kind = "rollback" if candidate.is_baseline else "promote"
            self._policy.set_incumbent(state, candidate, kind, reason)
            # It was judged by more than its own duration: only a new regime reopens the question, but where nothing was
            # tried yet, what the cap leaves is.
            if state.n_tried:
                state.quiet_until = NEVER_STEP
            self._report(Event(state, candidate, kind, reason))
