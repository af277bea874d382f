"""Variants of the plan that may train faster although no collective alone is: arms of the step guard's regression.

Under overlap a collective is not worth its own microseconds, and its channels hold multiprocessors that computation
lacks. So once the keys have settled, plans with fewer channels, of all keys or of one group, take turns with the plan
in force, in an order drawn by chance: what that does to steps is one more effect in the guard's filter.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Final

import numpy as np

from zerotune.agent.nccl.catalog import CHANNEL_LADDER
from zerotune.store.records import Candidate
from zerotune.tuner.learning.policy.acquisition import Z_90, comparison, expected_gain, saved
from zerotune.tuner.learning.policy.change_detection import CLIP
from zerotune.tuner.learning.policy.choice import MAX_NEW_TRIALS, NEVER_STEP, RETRY_STEPS, Event, Policy
from zerotune.tuner.learning.policy.keys import KeyState
from zerotune.tuner.learning.policy.observations import CallEvidence
from zerotune.tuner.learning.policy.plans import Load, PlanInForce, Variant
from zerotune.tuner.learning.policy.step_effects import (
    HORIZON_STEPS,
    LEAST_EFFECT,
    ONE_IN_TEN,
    PROVEN,
    Cooldown,
    KalmanFilter,
    StepEffects,
    in_pairs,
)
from zerotune.tuner.modeling.features import Ints, cell_of

ALL_EXPOSED: Final = 0.95
"""Share of communication that computation waits for, above which nothing is taken to hide."""
SETTLED_STEPS: Final = 20
"""Steps without a trial before variants begin, and between them: while keys settle, they would only disturb."""
MOST_AT_ONCE: Final = 3
"""By no more than this factor are channels reduced in one go: one cap says little of a far lower one."""
EXPOSURE: Final = 0.35
"""How far a group's exposure (the share of its calls' time that training waits for) may be from that of all."""
TOLL: Final = 0.012
"""How much (log) one channel may slow computation down while it is held, and how far a group's toll is from all's."""
MOST_LOST: Final = 0.1
"""What may slow a step down by more (log), at the 90 % bound of what is known, is not tried."""
MOST_AT_RISK: Final = 0.5
"""Share of the remaining budget that a variant may put at risk."""
FEW_STEPS: Final = 4.0
"""Where what runs can be withdrawn within this many steps, variants may run settings that were never measured."""
WINDOW_STEPS: Final = 2
ARM: Final = NEVER_STEP
"""Name of the variant in the regression: no slot has it."""


class Variants:
    """One job's variants; `consider` when a plan is made, `judge` while one is on trial.

    Args:
        policy: whose incumbents are replaced.
        effects: the guard's regression, which takes in every step.
        report: takes decisions.
    """

    def __init__(self, policy: Policy, effects: StepEffects, report: Callable[[Event], None]) -> None:
        self._policy = policy
        self._effects = effects
        self._report = report
        self._pairs = in_pairs(random.Random(0))
        self.reset()

    @property
    def running(self) -> Variant | None:
        """The variant that runs in this window."""
        return self.on_trial if self._is_on else None

    @property
    def leads_rest_at(self) -> Collection[int] | None:
        """While steps are compared, the keys at which nothing may run that is not proven; else None."""
        return None if self.on_trial is None else self.on_trial.changes.keys()

    @property
    def is_comparing(self) -> bool:
        """A variant is on trial, or looked for."""
        return self.on_trial is not None or self._search is not None

    def reset(self) -> None:
        """Steps of before are no yardstick: all may be asked for anew."""
        self.on_trial: Variant | None = None
        """Compared with the plan."""
        self._is_on = False
        """It runs in this window."""
        self._steps_in_window = 0
        self._on_us: list[float] = []
        """Durations of its steps."""
        self._n_off = 0
        self._usual_us = math.inf
        self._charged_us = 0.0
        """What the variant on trial has cost."""
        self._per_step_us = 0.0
        """What a step with the last variant costs."""
        self.cooldown = Cooldown()
        """By name: one trial may have been unlucky."""
        self._costs = KalmanFilter()
        """What all groups' channels cost training; then each group's exposure and toll, as they differ from all's."""
        self._costs.add(TOLL**2)
        self._places: dict[str, int] = {}
        """Of groups among them."""
        self._found: dict[float, dict[KeyState, Candidate]] = {}
        """By cap on channels, what keys would run."""
        self._search: Iterator[None] | None = None
        self._next_at_step = 0

    def learn(
        self, log_us: float, ran: Mapping[int, int], usual: Ints, states: list[KeyState], evidence: CallEvidence
    ) -> None:
        """Learn from a step, which the guard has not seen yet, what calls and channels cost training.

        Args:
            log_us: log duration, without exploration's cost.
            ran: key index by slot, of what ran instead of what is usual.
            usual: slot of what usually runs, by key.
            states: of all keys, by key index.
            evidence: of the regime in force.
        """
        if self._policy.price.exposed_share > ALL_EXPOSED:
            return
        loads: dict[str, Load] = {}
        slots = [*ran], usual[[*ran.values()]].tolist()
        times_us = (np.exp(evidence.centre(np.array(some, np.int64))).tolist() for some in slots)
        for key, slot, before, *us in zip(ran.values(), *slots, *times_us, strict=True):
            if math.isfinite(sum(us)):
                self._add(loads, states[key], (evidence.candidates[slot], evidence.candidates[before]), us)
        level, doubt = self._effects.level
        design, as_if_all = self._design(loads, math.exp(level))
        if design.any():
            self._costs.observe(design, log_us - level - as_if_all, math.hypot(doubt, self._effects.noise), clip=CLIP)

    def consider(
        self,
        states: list[KeyState],
        evidence: CallEvidence,
        step: int,
        step_us: float,
        *,
        may_begin: bool,
    ) -> None:
        """Once the keys have settled, begin the variant that is most worth it, if any is.

        Args:
            states: all keys.
            evidence: what calls took.
            step: the newest step.
            step_us: the usual step time; infinite where it is not known.
            may_begin: no promotion is under watch.
        """
        if self.on_trial is not None and not self.may_run(self.on_trial, states):
            self._end(step)  # there is no memory for it any more
        if self._policy.trials:
            self._search = None
            self._next_at_step = max(self._next_at_step, step + SETTLED_STEPS)
            return
        may_begin &= self._policy.has_settled or self._search is not None
        may_begin &= self.on_trial is None and step >= self._next_at_step and math.isfinite(step_us)
        # Channels take nothing from computation where none runs beside them.
        may_begin &= self._policy.price.exposed_share <= ALL_EXPOSED
        if not may_begin or self._policy.budget.remaining_us <= 0:
            return
        if self._search is None:
            self._search = self._look_for_settings(states, evidence)
        if next(self._search, True) is None:
            return
        self._search = None
        best, most = None, 0.0
        for variant in self._variants(states):
            if step >= self.cooldown.until(variant.name) and self._fits(variant, evidence):
                worth = self._worth(variant, step, step_us)
                if worth > most and self.may_run(variant, states):
                    best, most = variant, worth
        self._next_at_step = step + (SETTLED_STEPS if best is not None else RETRY_STEPS * SETTLED_STEPS)
        if best is not None:
            self.begin(best, step, step_us)

    def begin(self, variant: Variant, step: int, step_us: float) -> None:
        """Start alternating a variant with the plan itself.

        Args:
            variant: to try.
            step: the newest step.
            step_us: of the steps before.
        """
        self.on_trial, self._usual_us, self._charged_us = variant, step_us, 0.0
        self._on_us, self._n_off = [], 0
        self.cooldown.begin(variant.name, step)
        self._effects.know(ARM, MOST_LOST / ONE_IN_TEN)
        self._is_on, self._steps_in_window = next(self._pairs), 0

    def judge(self, in_force: PlanInForce, step: int, duration_us: float, states: list[KeyState]) -> bool:
        """Look at the regression after a step while a variant is on trial.

        Args:
            in_force: plan of the step.
            step: its number.
            duration_us: without exploration's cost.
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
        if is_on is self._is_on:  # else the window's plan is not in force yet
            self._steps_in_window += 1
            if self._steps_in_window >= WINDOW_STEPS:
                self._is_on, self._steps_in_window = next(self._pairs), 0
        slowdown, doubt = self._effects.effect({ARM: 1.0})
        gain = -slowdown
        is_better = gain > max(PROVEN * doubt, LEAST_EFFECT)
        is_over = gain + ONE_IN_TEN * doubt < LEAST_EFFECT or len(self._on_us) >= HORIZON_STEPS
        has_verdict = min(len(self._on_us), self._n_off) >= WINDOW_STEPS and (is_better or is_over)
        if not (has_verdict and self._policy.may_promote) and self._policy.budget.remaining_us >= 0:
            return False  # where the network changes just now, what steps take by that is no variant's doing
        words = "given up without a verdict: it cost more than was expected"
        if has_verdict:
            words = f"steps were {comparison(gain)} with it (90 %: give or take {100.0 * Z_90 * doubt:.1f}), so it "
            words += "runs now" if is_better else "does not run"
        self._tell(variant, f"{words}; that cost {self._charged_us:,.0f} us", states, step)
        if not has_verdict or gain + 2.0 * ONE_IN_TEN * doubt < LEAST_EFFECT:
            self.cooldown.begin(variant.name, NEVER_STEP)
        self._end(step)
        if has_verdict and is_better:
            self._adopt(variant, gain, states)
        return True

    def give_up(self, ratio: float, states: list[KeyState], step: int) -> None:
        """End the trial at once, if there is one. It may come back without the settings that are too slow.

        Args:
            ratio: times as long as usual that some calls took.
            states: of all keys, by key index.
            step: the newest step.
        """
        if self.on_trial is not None:
            words = f"given up, as calls took up to {ratio:.1f} times as long with it"
            self._tell(self.on_trial, words, states, step)
            self._end(step)

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

    def _look_for_settings(self, states: list[KeyState], evidence: CallEvidence) -> Iterator[None]:
        """Find what every key would run under each cap on channels, a few keys at a time."""
        most = max((state.n_channels for state in states), default=0)
        caps = [cap for cap in CHANNEL_LADDER if cap < most <= MOST_AT_ONCE * cap]
        self._found = {cap: {} for cap in (math.inf, *caps)}
        for n_looked_at, state in enumerate([*states], start=1):
            for cap, candidate in self._cheapest(state, states, evidence):
                self._found[cap][state] = candidate
            if n_looked_at % MAX_NEW_TRIALS == 0:
                yield

    def _cheapest(
        self, state: KeyState, states: list[KeyState], evidence: CallEvidence
    ) -> Iterator[tuple[float, Candidate]]:
        """What costs training least under each cap that the incumbent is above, and without one once that is known."""
        incumbent = evidence.find(state.index, state.incumbent)
        toll, variance = self._costs.expected(self._design({group_of(state): Load(0.0, 1.0)}, 1.0)[0])
        exposure = self._policy.price.exposed_share + float(self._costs.mean[self._places[group_of(state)]])
        caps = [cap for cap in self._found if cap < state.n_channels or (cap == math.inf and toll**2 > variance)]
        if not state.n_channels or not caps or incumbent is None or not math.isfinite(evidence.log_us(incumbent)):
            return
        options = self._policy.surrogate.fields.of(state).options
        mean, spread = state.opinion or self._policy.surrogate.posterior(state, evidence)
        channels = np.array([state.channels_of(option) for option in options])
        # What takes so long passes for a catastrophe.
        most_log_us = evidence.log_us(incumbent) + math.log(self._policy.settings.catastrophic_ratio)
        # Of many guesses the lowest is too low: a doubt counts against it, but where only channels differ.
        runs = cell_of(state.default_setting or state.incumbent if state.incumbent.is_baseline else state.incumbent)
        doubts = np.where([cell_of(option) == runs for option in options], 0.0, spread)
        may_run = (channels > 0) & (mean < most_log_us)
        us = np.exp(np.where(may_run, mean + doubts, 0.0))
        per_us = min(max(exposure, 0.0), 1.0) + max(toll, 0.0) * np.append(channels, state.n_channels)
        *costs, now = (np.append(us, math.exp(evidence.log_us(incumbent))) * per_us).tolist()
        in_order = [at for at in np.lexsort((us, costs)).tolist() if may_run[at]]
        for cap in caps:
            for at in in_order:
                option = options[at]
                if cap == math.inf and costs[at] >= now:
                    break
                if channels[at] <= cap and option not in state.banned and self._policy.options.may_run(state, option):
                    if option != state.incumbent:
                        yield cap, option
                    break

    def _variants(self, states: Sequence[KeyState]) -> Iterator[Variant]:
        """Those of all keys, and of each group alone: what is waited for wants other settings than what hides."""
        groups = sorted({group_of(state) for found in self._found.values() for state in found})
        for group in ["", *(groups if len(groups) > 1 else ())]:
            for found in self._found.values():
                changes = {state.index: one for state, one in found.items() if not group or group_of(state) == group}
                if changes:
                    most = max(states[index].channels_of(one) for index, one in changes.items())
                    name = f"at most {most} channels{group and ' for '}{group}"
                    yield Variant(name, changes, *self._loads(changes, states))

    def _loads(self, changes: Mapping[int, Candidate], states: Sequence[KeyState]) -> tuple[dict[str, Load], float]:
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
            self._add(loads, state, (candidate, state.incumbent), (then_us, now_us))
            worst_us += self._rate(state) * max(0.0, then_us * math.exp(ONE_IN_TEN * spread[0]) - now_us)
        return loads, worst_us

    def _add(
        self, loads: dict[str, Load], state: KeyState, settings: Sequence[Candidate], us: Sequence[float]
    ) -> None:
        """What one key's calls load a step with, if the first of two settings runs in place of the second."""
        now, before = (state.channels_of(one) for one in settings)
        rate, group = self._rate(state), group_of(state)
        calls_us, held_us = loads.get(group, Load())
        more_us, more_held_us = us[0] - us[1], now * us[0] - before * us[1]
        loads[group] = Load(calls_us + rate * more_us, held_us + rate * more_held_us)

    def _rate(self, state: KeyState) -> float:
        """Calls per step."""
        per_step = self._policy.price.traffic.per_step
        return float(per_step[state.index]) if state.index < len(per_step) else 0.0

    def _design(self, loads: Mapping[str, Load], step_us: float) -> tuple[np.ndarray, float]:
        """What these load a step with, by `_costs`; and what it costs (log) where all groups are exposed alike."""
        for group in loads:
            if group not in self._places:
                self._places[group] = self._costs.add(EXPOSURE**2, TOLL**2)
        design, calls_us = np.zeros(len(self._costs.mean)), 0.0
        for group, load in loads.items():
            place = self._places[group]
            design[place : place + 2] = load.calls_us / step_us, load.held_us / step_us
            design[0] += load.held_us / step_us
            calls_us += load.calls_us
        return design, math.log1p(max(-0.5, self._policy.price.exposed_share * calls_us / step_us))

    def _fits(self, variant: Variant, evidence: CallEvidence) -> bool:
        """Whether the budget has room for a variant; never for what nobody has measured, where that runs for long."""
        price = self._policy.price
        is_short = price.steps_at_risk <= FEW_STEPS
        is_known = is_short or all(evidence.has_measured(index, one) for index, one in variant.changes.items())
        room_us = MOST_AT_RISK * max(0.0, self._policy.budget.remaining_us)
        return is_known and variant.worst_us * 2.0 * price.steps_at_risk * price.charged_share <= room_us

    def _worth(self, variant: Variant, step: int, step_us: float) -> float:
        """What it is worth to try it, in steps' time: what may be gained by it later, less what it costs to see."""
        design, as_if_all = self._design(variant.loads, step_us)
        differs, variance = self._costs.expected(design)
        gain = -as_if_all - differs
        more_us = sum(load.calls_us for load in variant.loads.values())
        risk = self._policy.price.exposed_share * max(0.0, variant.worst_us - more_us) / step_us
        doubt = math.hypot(math.sqrt(variance), risk / ONE_IN_TEN, 1e-6)
        if gain - ONE_IN_TEN * doubt < -MOST_LOST:
            return 0.0
        loss = max(0.0, -gain)
        n_needed = 2.0 * (ONE_IN_TEN * self._effects.noise / loss) ** 2 if loss else math.inf
        return step * expected_gain(gain - LEAST_EFFECT, doubt) - loss * min(max(n_needed, 2.0), HORIZON_STEPS)

    def _charge(self) -> None:
        """What steps with the variant took longer, by their median: a checkpoint is not its doing."""
        typical_us = median_low(self._on_us)
        if len(self._on_us) == 1:
            typical_us = min(typical_us, self._policy.settings.catastrophic_ratio * self._usual_us)
        self._per_step_us = max(0.0, typical_us - self._usual_us)
        cost_us = len(self._on_us) * self._per_step_us
        self._policy.budget.spend(cost_us - self._charged_us)
        self._charged_us = cost_us

    def _end(self, step: int) -> None:
        """Back to the plan itself."""
        self._effects.forget([ARM])
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


def group_of(state: KeyState) -> str:
    """Keys whose calls cost training alike."""
    return f"{state.key.collective.name} in {state.key.phase.name}"
