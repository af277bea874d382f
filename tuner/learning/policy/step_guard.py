"""Compares steps with and without trials, provisional and newly promoted settings, and withdraws slow ones.

Calls may get faster while steps get slower. So every step adds to a regression of step time on settings
(`step_effects.py`). A slow effect there is only a suspicion, since training changes by itself, too. An experiment
decides it: the suspects pause for a few steps and then run at random, all together. If several are proven slow
together, each then runs at random by itself, which separates their effects.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from ....store.records import DecisionKind, StepRecord
from ...modeling.features import Ints
from ..explaining.words import pace, slower_steps
from .accounting import CONFIRMED, TrialAccounting
from .change_detection import MIN_SHIFT
from .choice import Event, Policy
from .observations import CLIP, ENOUGH, FALSE_PROMOTION, HORIZON_STEPS
from .overrides import CHARGED, Override, Setting
from .plans import PlanInForce, Plans
from .risk import ANY_SHARE
from .step_effects import (
    LEAST_DRIFT,
    LEAST_EFFECT,
    RECENT_STEPS,
    Cooldown,
    Effect,
    Shared,
    StepEffects,
    StepKinds,
    in_pairs,
    of_key,
)
from .variants import Variants

SUSPECTED: Final = 0.5
"""An experiment begins if steps are slower with a setting at this error level."""


class Slow(NamedTuple):
    """Settings with which steps are slower beyond doubt."""

    names: list[int]
    percent: float
    """By how much steps are slower with all of them together."""
    excess_us: float
    """Their cost so far."""
    n_with: int
    n_without: int
    """Steps of the experiment without them."""


@dataclass
class _Experiment:
    suspects: list[int]
    n_steps: int = 0
    n_without: int = 0
    """Steps without the suspects, including the pause at first."""
    apart_from: int | None = None
    """The step since which each suspect runs by itself, as all together are proven slow."""


class StepGuard:
    """Judges one job's steps; `step` returns the settings to withdraw, each by its name (slot) and key index."""

    def __init__(self) -> None:
        self._chance = random.Random(0)
        self._pairs = in_pairs(self._chance)
        self.effects = StepEffects()
        self.reset()

    @property
    def suspects(self) -> Sequence[int]:
        """The suspects of the running experiment; empty: none runs."""
        return self._experiment.suspects if self._experiment is not None else ()

    def reset(self) -> None:
        """All is asked anew."""
        self.effects.reset()
        self.effects.know(Shared.exposed, ANY_SHARE)
        self._n_steps = 0
        self._n_with: Counter[int] = Counter()
        self._odd: list[tuple[float, frozenset[int]]] = []
        """The newest steps while all deviate to one side: each one's deviation (log) and tried settings."""
        self.keys: dict[int, int] = {}
        """Key index by name of every setting that was tried."""
        self.longer: dict[int, float] = {}
        """By name, how much longer (log) steps would be if all calls were exposed; empty if exposure is measured."""
        self._experiment: _Experiment | None = None
        self.forced: dict[int, int | None] = {}
        """By key, the setting that the next step must run: a suspect, or the incumbent (None)."""
        self._recent: deque[tuple[float, frozenset[int]]] = deque(maxlen=RECENT_STEPS)
        """Log durations and tried settings of the newest steps."""

    def detect_level_shift(self, log_us: float, explored: Mapping[int, int]) -> float | None:
        """By how much (log) training itself became slower or faster, if it did; called before `step`.

        It did if several steps in a row deviate and one of them tried nothing that may be the cause. If all tried
        something and are slower, an experiment decides. If they are faster, only a new setting may be the cause.
        """
        shift = log_us - self.effects.expected(self._shares(name for name in explored if name in self.keys))
        is_odd = abs(shift) > max(MIN_SHIFT, CLIP * self.effects.noise)
        if not is_odd or (self._odd and self._odd[0][0] * shift < 0.0):
            self._odd.clear()
        if not is_odd or self._n_steps < 2 * ENOUGH:
            return None
        self._odd = [*self._odd, (shift, frozenset(explored))][-ENOUGH:]
        if len(self._odd) < ENOUGH:
            return None
        found = median(one for one, _ in self._odd)
        why = [{name for name in names if found > 0.0 or self._n_with[name] <= 2 * ENOUGH} for _, names in self._odd]
        if all(why):
            if self._experiment is None:
                names = sorted(set().union(*why))
                for name in names:  # earlier steps are no evidence on these any more
                    self.effects.know(name, (0.0, found))
                self._experiment = _Experiment(names) if found > 0.0 else None
            return None
        self._odd.clear()
        self._end()
        self.effects.level_moved(found)
        return found

    def step(
        self,
        log_us: float,
        explored: Mapping[int, int],
        slow_calls: Collection[int] = (),
        *,
        has_variant: bool | None = None,
    ) -> Slow | None:
        """Take in one step, and return the settings to withdraw, if any.

        `explored` maps the name (slot) of each setting that the step tried to its key index. Trials of `slow_calls` end
        anyway. While a variant is on trial, `has_variant` says whether it ran, and no other setting is judged.
        """
        self._n_steps += 1
        self.keys.update(explored)
        self.effects.step(log_us, self._shares(explored) | ({Shared.variant: 1.0} if has_variant else {}))
        self._recent.append((log_us, frozenset(explored)))
        self._n_with.update(explored.keys())
        if has_variant is not None:
            return None
        slow = None
        if self._experiment is None:
            self._suspect([name for name in explored if name not in slow_calls])
        else:
            slow = self._follow(self._experiment, explored)
        self._choose_forced()
        return slow

    def dismiss(self, names: Collection[int]) -> None:
        """Remove settings that will not run any more from the experiment."""
        if self._experiment is not None:
            self._experiment.suspects = [name for name in self.suspects if name not in names]
            if not self.suspects:
                self._end()
        self.forced = {key: name for key, name in self.forced.items() if name not in names}

    def became_usual(self, name: int, key: int) -> None:
        """Compare trials at `key` with this setting from now on."""
        self.keys[name] = key
        others = [one for one, at in self.keys.items() if at == key]
        self.effects.became_usual(self._shares([name]), [*others, of_key(key)])

    # ---- inside ---------------------------------------------------------------------------------------

    def _shares(self, names: Iterable[int]) -> dict[Effect, float]:
        """The regressors of a step with these settings: their own effects and their keys' shared effects."""
        settings = [*dict.fromkeys(names)]
        shares: dict[Effect, float] = dict.fromkeys(settings, 1.0)
        for name in settings:
            place = of_key(self.keys[name])
            shares[place] = shares.get(place, 0.0) + 1.0
        return shares | {Shared.exposed: sum(self.longer.get(name, 0.0) for name in settings)}

    def _effect(self, names: Iterable[int]) -> tuple[float, float]:
        return self.effects.effect(self._shares(names))

    def _is_slow(self, names: Collection[int], alpha: float) -> bool:
        return self.effects.slowdown(self._shares(names)).is_proven(alpha, LEAST_EFFECT)

    def _suspect(self, explored: Iterable[int]) -> None:
        """Begin an experiment if steps seem slower with the settings of this one, together or each by itself."""
        asked = [name for name in explored if self._n_with[name] >= CONFIRMED]
        if not asked:
            return
        means, doubts = self.effects.alone([self._shares([name]) for name in asked])
        ratios = np.where(means > LEAST_EFFECT, means / np.maximum(doubts, LEAST_DRIFT), 0.0)
        most = int(np.argmax(ratios))
        together, doubt = self._effect(asked)
        if together <= LEAST_EFFECT or ratios[most] * doubt > together:
            asked, together, doubt = [asked[most]], float(means[most]), float(doubts[most])
        if self._is_slow(asked, SUSPECTED):
            self._experiment = _Experiment(asked)

    def _choose_forced(self) -> None:
        """Choose the next step's suspects: first none, then all or none at random, or each by itself at random."""
        asked, self.forced = self._experiment, {}
        if asked is None:
            return
        at_key: dict[int, list[int]] = {}
        for name in asked.suspects:
            at_key.setdefault(self.keys[name], []).append(name)
        together = asked.n_steps >= ENOUGH and next(self._pairs)
        for key, names in at_key.items():
            is_on = together if asked.apart_from is None else self._chance.random() < 0.5
            self.forced[key] = self._chance.choice(names) if is_on else None

    def _follow(self, asked: _Experiment, ran: Collection[int]) -> Slow | None:
        """Judge a step of the experiment: first all suspects together; once they are proven slow, each by itself."""
        asked.n_steps += 1
        asked.n_without += not any(name in ran for name in asked.suspects)
        mean, doubt = self._effect(asked.suspects)
        if asked.n_without < ENOUGH:
            if asked.n_steps >= HORIZON_STEPS:  # plans do not reach the ranks: the experiment cannot decide
                self._end()
        elif asked.apart_from is None and not self._is_slow(asked.suspects, FALSE_PROMOTION):
            is_hopeless = asked.n_steps >= 2 * ENOUGH and mean < max(doubt, LEAST_EFFECT)
            if is_hopeless or asked.n_steps >= RECENT_STEPS:
                self._end()
        elif asked.apart_from is None and len(asked.suspects) > 1:
            asked.apart_from = asked.n_steps
        elif asked.apart_from is not None and not self._is_slow(asked.suspects, SUSPECTED):
            self._end()
        else:
            guilty = [name for name in asked.suspects if self._is_slow([name], FALSE_PROMOTION)]
            if not guilty and asked.n_steps - (asked.apart_from or 0) >= RECENT_STEPS // 2:
                guilty = [name for name in asked.suspects if self._effect([name])[0] > LEAST_EFFECT] or asked.suspects
            if guilty:
                return self._confirm_slow(guilty)
        return None

    def _confirm_slow(self, guilty: list[int]) -> Slow:
        """Take the slowdown from medians: the regression clips steps, so it underestimates a very slow setting."""
        without = [log_us for log_us, ran in self._recent if ran.isdisjoint(guilty)]
        with_it = [log_us for log_us, ran in self._recent if not ran.isdisjoint(guilty)][-len(without) :]
        slower = self._effect(guilty)[0]
        if with_it and without:
            slower = max(slower, median(with_it) - median(without))
        excess_us = math.expm1(slower) * max(self._n_with.pop(name) for name in guilty)
        excess_us *= math.exp(self.effects.expected({}))
        self.dismiss(guilty)
        self.effects.forget([*guilty, *(of_key(self.keys[name]) for name in guilty)])
        return Slow(guilty, 100.0 * math.expm1(slower), excess_us, len(with_it), len(without))

    def _end(self) -> None:
        self._experiment, self.forced = None, {}


KNOWN_STEPS: Final = 14
"""Known steps before the first trial begins. A recommended setting needs only a third of them, so that it runs within
ten steps: its risk is reserved as that of a catastrophe.
"""


class StepFeedback:
    """Judges one job's plans by its step times: pauses, withdraws or replaces trials, provisionals and incumbents."""

    def __init__(
        self, policy: Policy, plans: Plans, accounting: TrialAccounting, report: Callable[[Event], None]
    ) -> None:
        self._policy = policy
        self._plans = plans
        self._accounting = accounting
        self._report = report
        self.kinds = StepKinds()
        self._guard = StepGuard()
        self.variants = Variants(policy, self._guard.effects, report)
        self._waiting: deque[StepRecord] = deque()
        self._recent: deque[float] = deque(maxlen=HORIZON_STEPS)
        """Durations (us) of the newest steps without exploration's cost, oldest first."""
        self.reset()

    @property
    def is_busy(self) -> bool:
        """Whether no trial may begin: steps are compared, or the guard knows too few steps."""
        return self.variants.on_trial is not None or bool(self._guard.suspects) or len(self._recent) < KNOWN_STEPS // 3

    @property
    def is_new(self) -> bool:
        """Whether the guard knows too few steps for any trial but those of recommended settings."""
        return len(self._recent) < KNOWN_STEPS

    def reset(self) -> None:
        """The network's regime changed: forget all evidence of steps."""
        self.variants.reset()
        self._recent.clear()
        self._guard.reset()
        self._usual: Ints = np.zeros(0, np.int64)
        """By key, the slot that trials there are compared with."""
        self.promoted: dict[int, tuple[int, int]] = {}
        """Keys whose incumbent is still compared with the one before: its slot, and the steps compared so far."""
        self.withdrawn = Cooldown()
        """Keys at which a setting slowed steps down."""

    def step_finished(self, step: StepRecord, known_step: int) -> bool:
        """Judge steps once their measurements have come, so that exploration's own cost can be subtracted.

        `known_step` is the newest measured step. Returns True if a new plan is due at once.
        """
        is_urgent = False
        self._waiting.append(step)
        while self._waiting and (
            self._waiting[0].step < known_step
            or len(self._waiting) > ENOUGH
            or self._explores_nothing(self._waiting[0].epoch)
        ):
            is_urgent |= self._judge(self._waiting.popleft())
        return is_urgent

    def consider_variants(self, step: int) -> None:
        """Once the keys have settled, let variants of the whole plan compete on step time."""
        step_us = median(self._recent) if self._recent else math.inf
        is_guarding = bool(self.promoted) or bool(self._guard.suspects)
        self.variants.consider(step, step_us, may_begin=not is_guarding)

    def forced(self) -> dict[int, Setting]:
        """The settings that the variant or the experiment requests for the next window, by key index."""
        if (variant := self.variants.running) is not None:
            return {index: Setting(candidate, Override.variant) for index, candidate in variant.changes.items()}
        states, evidence, suspects = self._policy.states, self._policy.evidence, self._guard.suspects
        runs = {name: states[int(evidence.key[name])].has(evidence.candidates[name]) for name in suspects}
        self._guard.dismiss([name for name in suspects if not runs[name]])
        may_try, found = self._policy.budget.remaining_us >= 0, {}
        for key, name in self._guard.forced.items():
            shown = name if may_try else None
            candidate = evidence.candidates[self._usual[key] if shown is None else shown]
            explores = shown is not None and candidate != states[key].incumbent
            found[key] = Setting(candidate, Override.experiment if explores else Override.pause)
        return found

    # ---- inside ---------------------------------------------------------------------------------------

    def _judge(self, step: StepRecord) -> bool:
        """Judge one step whose measurements are complete or lost; True if a new plan is due at once."""
        states = self._policy.states
        guard, extra_us = self._guard, self._accounting.extra_us.pop(step.step, 0.0)
        in_force, variant = self._plans.get(step.epoch), self.variants.on_trial
        if in_force is not None and in_force.is_control:
            return False  # a control window is no evidence on trials, nor a usual step
        without_extra_us = max(step.duration_us - extra_us, 0.2 * step.duration_us)
        duration_us = self.kinds.usual_us(step.step, without_extra_us)
        if duration_us is None:
            return False
        usual_us = median(self._recent) if len(self._recent) >= ENOUGH else math.inf
        is_longer = duration_us > usual_us * math.exp(CLIP * guard.effects.noise)
        connected = self._accounting.connected(step.step, duration_us - usual_us if is_longer else 0.0)
        if in_force is None:
            return False
        if not connected:
            self._recent.append(duration_us)
        if in_force.variant not in (None, variant):
            self.variants.charge_late()
            return False
        log_us, forced = math.log(step.duration_us * duration_us / without_extra_us), guard.forced
        explored, exposed = self._explored(in_force), self._policy.trial_cost.exposed
        level_us = math.exp(guard.effects.expected({})) if math.isfinite(usual_us) else math.inf
        longer = self._longer(explored, level_us)
        guard.longer |= longer
        exposed.estimate = guard.effects.effect({Shared.exposed: 1.0})
        if in_force.variant is not None:
            explored = {name: key for name, key in explored.items() if key not in in_force.variant.changes}
        if variant is not None:
            guard.step(log_us, explored, has_variant=in_force.variant is not None)
            may_promote = not self._accounting.is_suspicious
            return self.variants.judge(in_force, step.step, duration_us, may_promote=may_promote)
        shift = guard.detect_level_shift(log_us, explored)
        slow = guard.step(log_us, explored, {name for name in explored if longer.get(name, 0.0) > 0.0})
        if slow is not None:
            self._withdraw(slow, step.step)
        if shift is not None and states:  # earlier steps are no reference any more
            self.variants.reset()
            self._recent = deque([*self._recent][-ENOUGH:], HORIZON_STEPS)
            self._report(Event(states[0], states[0].incumbent, DecisionKind.pace, pace(shift), step.step))
        return forced != guard.forced

    def _explored(self, in_force: PlanInForce) -> dict[int, int]:
        """The settings that a plan tries, and the key of each."""
        states, evidence = self._policy.states, self._policy.evidence
        new = [evidence.slot(state.index, state.incumbent) for state in states[len(self._usual) :]]
        self._usual = np.append(self._usual, np.array(new, np.int64))
        slots, why = self._plans.slots(in_force.plan.epoch), in_force.why(len(states))
        tries = CHARGED[why] | (why == Override.variant)
        differs = slots != self._usual
        for key in np.flatnonzero(differs & ~tries).tolist():
            if self.promoted.get(key, (-1, 0))[0] != slots[key]:
                self.promoted[key] = int(slots[key]), 0
        for key, (slot, n_steps) in [*self.promoted.items()]:
            if evidence.candidates[slot] != states[key].incumbent:
                del self.promoted[key]  # it was withdrawn or replaced elsewhere
                continue
            self.promoted[key] = slot, n_steps + 1
            before = evidence.candidates[int(self._usual[key])]
            if n_steps >= 2 * RECENT_STEPS or not self._policy.tables.offers(states[key].family, before):
                del self.promoted[key]
                self._guard.became_usual(slot, key)
                self._usual[key], differs[key] = slot, slot != slots[key]
        tried = np.flatnonzero(differs)
        return dict(zip(slots[tried].tolist(), tried.tolist(), strict=True))

    def _longer(self, explored: Mapping[int, int], level_us: float) -> dict[int, float]:
        """How much longer (log) steps of `level_us` would be with each setting if training waited for all its calls."""
        evidence, rates, found = self._policy.evidence, self._policy.trial_cost.traffic.per_step, {}
        for name, key in explored.items():
            us, usual_us = (math.exp(evidence.log_us(slot)) for slot in (name, int(self._usual[key])))
            if key < len(rates) and math.isfinite(us - usual_us):
                found[name] = math.log(max(0.01, 1.0 + float(rates[key]) * (us - usual_us) / level_us))
        return found

    def _withdraw(self, slow: Slow, step: int) -> None:
        states, evidence = self._policy.states, self._policy.evidence
        self._policy.budget.spend(slow.excess_us)
        words = slower_steps(slow.percent, len(slow.names) - 1, slow.n_with, slow.n_without)
        for name in slow.names:
            state, candidate = states[int(evidence.key[name])], evidence.candidates[name]
            if state.has(candidate):
                if candidate == state.incumbent:
                    self.promoted.pop(state.index, None)
                state.cooldown_until = self.withdrawn.begin(state.index, step)
                self._policy.end_trial(state)
                before = evidence.candidates[int(self._usual[state.index])]
                self._policy.drop(state, candidate, words, ban=True, before=before)

    def _explores_nothing(self, epoch: int) -> bool:
        """Whether a step with that plan has no cost of exploration, so that its measurements need not be awaited."""
        in_force = self._plans.get(epoch)
        return in_force is not None and not CHARGED[in_force.overrides].any()
