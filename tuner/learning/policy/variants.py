"""Variants of the plan that may shorten steps although no single collective gets faster.

Under overlap a collective costs a step less than its own time, but its channels hold multiprocessors that computation
needs. So once the keys have settled, settings with less channel time alternate with the plan in random order, at all
keys or at those of one group. Their effect on steps is one more effect in the step guard's regression.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator
from statistics import median_low
from typing import Final

import numpy as np

from ....store.records import Candidate, DecisionKind
from ...modeling.posterior import Column
from ..explaining.words import saved, variant_ended
from .acquisition import TRIAL_STEPS
from .choice import NEVER_STEP, Event, Policy
from .keys import KeyState
from .observations import AT_ONCE, HORIZON_STEPS, contrast_of, level_of
from .plans import PlanInForce, Variant
from .risk import CATASTROPHIC_RATIO, FIRST_LOOK_STEPS
from .step_effects import LEAST_EFFECT, ONE_IN_TEN, Cooldown, Shared, StepEffects, in_pairs

ALL_EXPOSED: Final = 0.95
"""Exposed share of communication above which no overlap is assumed."""
MOST_LOST: Final = 0.1
"""A variant is not tried if it may slow a step down by a larger share, by the 90 % bound of its calls' time."""
SLOWER: Final = (1.3, CATASTROPHIC_RATIO)
"""Factors by which a variant's calls may take longer, in exchange for free channels."""


class Variants:
    """One job's variants: `consider` them when a plan is made; `judge` the one on trial by the guard's `effects`."""

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
    def provisionals_rest_at(self) -> Collection[int] | None:
        """While steps are compared, the keys at which only proven settings may run; else None."""
        return None if self.on_trial is None else self.on_trial.changes.keys()

    def reset(self) -> None:
        """Earlier steps are no reference any more: every variant may be tried again."""
        self.on_trial: Variant | None = None
        """The variant that is compared with the plan."""
        self._order: dict[str, int] = {}
        """Number, from 1, of each variant that was on trial, by name; later ones get a smaller error level."""
        self._is_on = False
        """Whether the variant runs in this window."""
        self._steps_in_window = 0
        self._on_us: list[float] = []
        """Durations of the variant's steps."""
        self._n_off = 0
        self._usual_us = math.inf
        self._charged_us = 0.0
        """Cost of the variant on trial so far."""
        self.cooldown = Cooldown()
        """Rests by variant name: a failed variant is tried again later, as its trial may have been unlucky."""
        self._open: list[tuple[float, str]] = []
        """Rest of this round, the next one last: a factor of `SLOWER`, and the group or "" for all keys."""
        self._slower: set[int] = set()
        """Keys whose variants made steps slower: they are left out of variants with other keys."""
        self._search: Iterator[Variant | None] | None = None
        self._next_at_step = 0

    def consider(self, step: int, step_us: float, *, may_begin: bool) -> None:
        """Once the keys have settled, look at one variant and begin its trial if it may run.

        An unknown `step_us`, the usual step time, is infinite.
        """
        policy = self._policy
        if self.on_trial is not None and not self._has_memory(self.on_trial):
            self._end(step)
        if policy.trials:
            self._next_at_step = max(self._next_at_step, step + TRIAL_STEPS)
        may_begin &= self.on_trial is None and step >= self._next_at_step and math.isfinite(step_us)
        # Channels take nothing from computation unless it overlaps with them.
        may_begin &= policy.has_settled and policy.trial_cost.exposed.bounds[0] <= ALL_EXPOSED
        if not may_begin or policy.budget.remaining_us <= 0:
            return
        if not self._open:
            groups = sorted({group_of(state) for state in policy.states})
            self._open = [(slower, one) for slower in SLOWER for one in ["", *(groups if len(groups) > 1 else ())]]
        self._search = self._search or self._lighter(*self._open.pop())
        variant = next(self._search)
        if variant is None:
            return
        self._search = None
        if variant.changes and self._may_begin(variant, step, step_us):
            self.begin(variant, step, step_us)
        elif not self._open:
            self._next_at_step = step + TRIAL_STEPS

    def begin(self, variant: Variant, step: int, step_us: float) -> None:
        """Start alternating a variant with the plan itself, whose steps took `step_us`."""
        self.on_trial, self._usual_us, self._charged_us = variant, step_us, 0.0
        self._order.setdefault(variant.name, len(self._order) + 1)
        self._on_us, self._n_off = [], 0
        self.cooldown.begin(variant.name, step)
        self._effects.know(Shared.variant, (0.0, MOST_LOST / ONE_IN_TEN))
        self._is_on, self._steps_in_window = next(self._pairs), 0

    def judge(self, in_force: PlanInForce, step: int, duration_us: float, *, may_promote: bool = True) -> bool:
        """Look at the regression after a step while a variant is on trial; returns whether a new plan is due at once.

        `duration_us` is without exploration's cost. `may_promote` is False while the network changes, as that changes
        step times, too.
        """
        variant, is_on = self.on_trial, in_force.variant is not None
        if variant is None or in_force.variant not in (None, variant):
            return False
        if is_on:
            self._on_us.append(duration_us)
            self._charge()
        else:
            self._n_off += 1
        if is_on is self._is_on:  # otherwise the window's plan is not in force yet
            self._steps_in_window += 1
            if self._steps_in_window >= FIRST_LOOK_STEPS:
                self._is_on, self._steps_in_window = next(self._pairs), 0
        slowdown, doubt = self._effects.effect({Shared.variant: 1.0})
        gain = -slowdown
        level = level_of(self._order[variant.name])
        is_better = contrast_of(gain, doubt, self._effects.noise).is_proven(level, LEAST_EFFECT)
        is_over = gain + ONE_IN_TEN * doubt < LEAST_EFFECT or len(self._on_us) >= HORIZON_STEPS
        has_verdict = min(len(self._on_us), self._n_off) >= FIRST_LOOK_STEPS and (is_better or is_over)
        if not (has_verdict and may_promote) and self._policy.budget.remaining_us >= 0:
            return False
        words = variant_ended((gain, doubt) if has_verdict else None, self._charged_us, is_better=is_better)
        self._report_end(variant, words, step)
        if not has_verdict or gain + 2.0 * ONE_IN_TEN * doubt < LEAST_EFFECT:
            self.cooldown.begin(variant.name, NEVER_STEP)
        self._end(step)
        if has_verdict and is_better:
            self._adopt(variant, gain)
        elif gain < 0.0:
            self._slower |= variant.changes.keys()
        return True

    def give_up(self, ratio: float, step: int) -> None:
        """End the trial at once: calls took `ratio` times as long. It may be tried again without the slow setting."""
        if self.on_trial is not None:
            self._report_end(self.on_trial, f"given up, as calls took up to {ratio:.1f} times as long with it", step)
            self._end(step)

    def charge_late(self) -> None:
        """Charge a step of a variant whose trial has ended while the next plan is still on its way."""
        self._policy.budget.spend(self._charged_us / max(1, len(self._on_us)))

    # ---- inside ---------------------------------------------------------------------------------------

    def _lighter(self, slower: float, group: str) -> Iterator[Variant | None]:
        """The variant with the least channel time at every key of a group; calls take at most `slower` times as long.

        Yields None until all keys are looked at, a few at a time.
        """
        changes: dict[int, Candidate] = {}
        worst_us, most = 0.0, 0
        for n_looked_at, state in enumerate([*self._policy.states], start=1):
            if n_looked_at % AT_ONCE == 0:
                yield None
            field, last_posterior = self._policy.tables.of(state), state.last_posterior
            most_channels = state.channels_of(state.incumbent)
            is_known = last_posterior is not None and len(last_posterior[0]) == len(field.options) and most_channels > 0
            is_asked = group == group_of(state) or (not group and state.index not in self._slower)
            if last_posterior is None or not is_known or not is_asked:
                continue
            (mean, spread), here = last_posterior, field.place[state.incumbent]
            channels = np.array([state.channels_of(option) for option in field.options])
            cells = field.table[:, [Column.algorithm, Column.protocol]]
            # The lowest of many guesses is too low, so doubt counts against it unless only channels differ.
            log_us = mean + np.where((cells == cells[here]).all(axis=1), 0.0, spread)
            fits = (channels > 0) & (channels <= most_channels) & np.isfinite(mean[here])
            fits &= log_us <= mean[here] + math.log(slower)
            held = np.where(fits, channels * np.exp(np.where(fits, log_us, 0.0)), np.inf)
            for at in np.argsort(held).tolist():
                if at == here or not fits[at]:
                    break
                setting = field.options[at]
                if setting not in state.banned and self._policy.options.may_run(state, setting):
                    more_us = math.exp(mean[at] + ONE_IN_TEN * spread[at]) - math.exp(mean[here])
                    worst_us += self._policy.trial_cost.traffic.per_step[state.index] * max(0.0, more_us)
                    changes[state.index], most = setting, max(most, int(channels[at]))
                    break
        yield Variant(f"at most {most} channels{group and ' for '}{group}", changes, float(worst_us))

    def _may_begin(self, variant: Variant, step: int, step_us: float) -> bool:
        """Whether the variant may begin now: memory and budget have room for it, and no step may be much slower."""
        trial_cost, has_measured = self._policy.trial_cost, self._policy.evidence.has_measured
        is_short = trial_cost.latency.steps <= 2 * FIRST_LOOK_STEPS  # if not, unmeasured settings must not run
        is_known = is_short or all(has_measured(*change) for change in variant.changes.items())
        is_mild = variant.worst_us < MOST_LOST * step_us  # even if training waited for all of it
        at_risk_us = 2.0 * trial_cost.latency.steps * trial_cost.charged_share * variant.worst_us
        fits = at_risk_us <= self._policy.budget.remaining_us and self._has_memory(variant)
        return is_known and is_mild and fits and step >= self.cooldown.until(variant.name)

    def _has_memory(self, variant: Variant) -> bool:
        """Whether device memory allows all settings of a variant."""
        changes = ((self._policy.states[index], candidate) for index, candidate in variant.changes.items())
        settings = {(self._policy.options.what_runs(*change), change[0].key.communicator) for change in changes}
        return self._policy.memory.allows_all(settings)

    def _charge(self) -> None:
        """Charge the median extra time of steps with the variant; the median ignores a checkpoint."""
        typical_us = median_low(self._on_us)
        if len(self._on_us) == 1:
            typical_us = min(typical_us, CATASTROPHIC_RATIO * self._usual_us)
        cost_us = len(self._on_us) * max(0.0, typical_us - self._usual_us)
        self._policy.budget.spend(cost_us - self._charged_us)
        self._charged_us = cost_us

    def _end(self, step: int) -> None:
        """End the trial and return to the plan itself."""
        self._effects.forget([Shared.variant])
        self.on_trial, self._is_on = None, False
        self._next_at_step = step + TRIAL_STEPS

    def _report_end(self, variant: Variant, words: str, step: int) -> None:
        state = self._policy.states[min(variant.changes)]
        words = f"another plan on trial, {variant.name}: {words}"
        self._report(Event(state, state.incumbent, DecisionKind.variant, words, step))

    def _adopt(self, variant: Variant, gain: float) -> None:
        """Steps were faster with the variant: its settings become the incumbents."""
        reason = f"steps are {saved(gain)} faster with {variant.name}"
        for index, candidate in variant.changes.items():
            state = self._policy.states[index]
            state.max_channels = state.channels_of(candidate)
            state.banned[state.incumbent] = f"given up: {reason}"
            kind = DecisionKind.rollback if candidate.is_baseline else DecisionKind.promote
            self._policy.set_incumbent(Event(state, candidate, kind, reason))
            # The variant was judged by step time: only a new regime reopens that. At keys without trials, candidates
            # within the channel cap may still be tried.
            if state.trial_order:
                state.cooldown_until = NEVER_STEP


def group_of(state: KeyState) -> str:
    """The group of keys whose calls cost training the same."""
    return f"{state.key.collective.name} in {state.key.phase.name}"
