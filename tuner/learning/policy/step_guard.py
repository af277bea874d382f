"""Compares steps with and without what is on trial, leads or was promoted lately, and withdraws what slows them down.

Calls may get faster and steps slower. So every step adds to a regression of what each setting does to steps
(`step_effects.py`). What that says is a suspicion only: settings come and go for reasons of their own, and training
changes by itself. It is settled by an experiment. The suspects pause for a few steps, and then run by chance, all
together; if that proves several to be slow together, each runs by its own chance, which tells them apart.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from zerotune.store.records import StepRecord
from zerotune.tuner.learning.policy.attribution import Attribution
from zerotune.tuner.learning.policy.choice import Event, Policy
from zerotune.tuner.learning.policy.keys import KeyState
from zerotune.tuner.learning.policy.observations import CallEvidence
from zerotune.tuner.learning.policy.plans import PlanBook, PlanInForce, Variant
from zerotune.tuner.learning.policy.step_effects import StepEffects, StepKinds
from zerotune.tuner.learning.policy.variants import ARM, Variants
from zerotune.tuner.modeling.features import Ints

ASKED: Final = 2.0
"""Standard deviations by which steps must seem slower with what explores for an experiment to begin."""
LIMIT: Final = 3.3
"""Standard deviations by which steps are slower with what is withdrawn."""
LEAST_SLOWDOWN: Final = 0.004
"""Less (log) is not worth asking."""
LEAST_WITH: Final = 2
"""Steps with what is suspected: one is a straggler."""
INNOCENT: Final = 1.3
"""Standard deviations by which what is innocent is faster than was suspected."""
APART_STEPS: Final = 16
"""Steps for which several that are slow together take turns one by one, until the worse ones are withdrawn."""
PAUSE_STEPS: Final = 3
"""Steps without any of them, the first of an experiment, before there is a verdict."""
PATIENCE_STEPS: Final = 100
"""Steps after which a pause that does not come about is waited for no longer."""
LEAST_STEPS: Final = 6
MOST_STEPS: Final = 32
"""Steps of an experiment after which it ends where little seems to come of it, and in any case."""
RECENT_STEPS: Final = 24
"""Steps by which it is told how slow something is."""
INNOCENT_REST_STEPS: Final = 25
"""What turned out to be innocent is not suspected for this long, and for twice as long after each further time."""
N_PLACES: Final = 48
"""With more keys some share what is known of them: what each does to a step is little, and work per step is bounded."""
MOST_ALONE: Final = 32
"""So many settings are suspected by themselves in one step; with more they take turns."""
N_IN_A_ROW: Final = 3
"""So many steps off to one side are another pace of training: one or two are stragglers."""
LEAST_SHIFT: Final = 0.04
SHIFT_SCALES: Final = 5.0
"""A step is off by at least so much (log), and by so many noise scales: less may be drift."""


class Slow(NamedTuple):
    """Beyond doubt steps are slower with these settings."""

    names: list[int]
    percent: float
    """All of them together."""
    excess_us: float
    """What they cost so far."""
    n_with: int
    n_without: int
    """Steps of the experiment."""


class _Odd(NamedTuple):
    shift: float
    names: frozenset[int]


class StepGuard:
    """One job's steps; `step` answers with what is to be withdrawn. Settings have names, and keys of their own."""

    def __init__(self) -> None:
        self._chance = random.Random(0)
        self.reset()

    @property
    def suspects(self) -> Sequence[int]:
        """What an experiment is about; empty: there is none."""
        return self._suspects

    def reset(self) -> None:
        """All is asked anew."""
        self.effects = StepEffects()
        self._n_steps = 0
        self._n_with: dict[int, float] = {}
        self._odd: list[_Odd] = []
        """The newest steps, as long as all are off to one side."""
        self.keys: dict[int, int] = {}
        """Of every setting that was tried."""
        self._suspects: list[int] = []
        self._predicted = 0.0
        """By how much (log) all of them together seemed slower."""
        self.shown: dict[int, int | None] = {}
        """What runs in the next step, whatever else would, by key: one of the suspects, or the incumbent (None)."""
        self._others: dict[int, int | None] = {}
        """In the step after that."""
        self._is_apart, self._apart_from = False, 0
        """Suspects take turns one by one, since that many steps of the experiment."""
        self._n_asked = self._n_without = 0
        """Steps of the experiment, and those without any of the suspects."""
        self._recent: deque[tuple[float, frozenset[int]]] = deque(maxlen=RECENT_STEPS)
        """Log duration, and what was tried."""
        self._innocent: dict[int, tuple[int, int]] = {}
        """By key, until when it is not suspected, and how often it turned out to be innocent."""

    def paced(self, log_us: float, explored: Mapping[int, int], unsaved_shift: float) -> float | None:
        """Whether training's own pace has changed.

        Several steps in a row are off, and nothing that is tried ran in all of them. Where something did and steps are
        slower, it is suspected, and then it is known; where they are faster, only what is new may be why.

        Args:
            log_us: log duration of a step that `step` has not seen.
            explored: as in `step`.
            unsaved_shift: by how much (log) it differs from others but for what settings save according to calls.
                Only what is off by both is another pace.

        Returns:
            By how much (log), if that is what the newest steps show.
        """
        shift = log_us - self.effects.expected(self._shares(name for name in explored if name in self.keys))
        is_odd = min(abs(shift), abs(unsaved_shift)) > max(LEAST_SHIFT, SHIFT_SCALES * self.effects.noise)
        if not is_odd or shift * unsaved_shift < 0.0 or (self._odd and self._odd[0].shift * shift < 0.0):
            self._odd.clear()
        if not is_odd or self._n_steps < 2 * LEAST_STEPS:
            return None
        self._odd = [*self._odd, _Odd(shift, frozenset(explored))][-N_IN_A_ROW:]
        if len(self._odd) < N_IN_A_ROW:
            return None
        found = median(one.shift for one in self._odd)
        in_all = frozenset.intersection(*(one.names for one in self._odd))
        if found < 0.0:
            in_all = frozenset(name for name in in_all if self._n_with.get(name, 0.0) <= 2 * N_IN_A_ROW)
        if in_all:
            if found > 0.0 and not self._suspects:
                for name in in_all:  # what earlier steps say of these is over
                    self.effects.know(name, found)
                self._ask(sorted(in_all), found)
            return None
        self._odd.clear()
        self._acquit()
        self.effects.level_moved(found)
        return found

    def compare(self, log_us: float, explored: Mapping[int, int], arm: int | None) -> None:
        """Take in one step while an arm of the regression takes turns; nothing is asked of all else then.

        Args:
            log_us: log duration.
            explored: as in `step`.
            arm: its name where it ran.
        """
        self.keys.update(explored)
        self.effects.step(log_us, self._shares(explored) | ({} if arm is None else {arm: 1.0}))

    def step(self, log_us: float, explored: Mapping[int, int], slow_calls: Collection[int] = ()) -> Slow | None:
        """Take in one step.

        Args:
            log_us: log duration.
            explored: key index by name (slot) of each setting that was tried in it.
            slow_calls: what is slow by its calls: they will end it.

        Returns:
            What is to be withdrawn, if anything.
        """
        self._n_steps += 1
        self.keys.update(explored)
        self.effects.step(log_us, self._shares(explored))
        self._recent.append((log_us, frozenset(explored)))
        for name in explored:
            self._n_with[name] = self._n_with.get(name, 0.0) + 1.0
        if self._suspects:
            return self._follow(explored)
        self._suspect([name for name in explored if name not in slow_calls])
        return None

    def dismiss(self, names: Collection[int]) -> None:
        """These will not run any more, whatever the experiment would say."""
        self._suspects = [name for name in self._suspects if name not in names]
        if not self._suspects:
            self._end()
        self.shown = {key: name for key, name in self.shown.items() if name not in names}

    def became_usual(self, name: int, key: int) -> None:
        """What is tried at `key` is compared with this from now on."""
        self.keys[name] = key
        others = [one for one, at in self.keys.items() if at == key]
        self.effects.became_usual(self._shares([name]), [*others, _of_key(key)])

    # ---- inside ---------------------------------------------------------------------------------------

    def _shares(self, names: Iterable[int]) -> dict[int, float]:
        """What a step is made of that runs these: each by itself, and what all at a key have in common."""
        shares = dict.fromkeys(names, 1.0)
        for name in [*shares]:
            place = _of_key(self.keys[name])
            shares[place] = shares.get(place, 0.0) + 1.0
        return shares

    def _effect(self, names: Iterable[int]) -> tuple[float, float]:
        return self.effects.effect(self._shares(names))

    def _suspect(self, explored: Iterable[int]) -> None:
        """Begin an experiment if steps seem slower with what ran in this one, all of it or one by itself."""
        asked = [
            name
            for name in explored
            if self._n_with[name] >= LEAST_WITH and self._n_steps >= self._innocent.get(self.keys[name], (0, 0))[0]
        ]
        best: list[int] = []
        predicted, most = 0.0, ASKED
        at = self._n_steps * MOST_ALONE % max(1, len(asked))
        for group in [asked, *([name] for name in [*asked[at:], *asked[:at]][:MOST_ALONE])]:
            mean, doubt = self._effect(group)
            if group and mean > max(LEAST_SLOWDOWN, most * doubt):
                best, predicted, most = group, mean, mean / doubt
        if best:
            self._ask(best, predicted)

    def _ask(self, names: list[int], predicted: float) -> None:
        """Begin an experiment with these, which seem as slow as `predicted`."""
        self._suspects, self._predicted = names, predicted
        self._n_asked = self._n_without = 0
        self._is_apart, self._apart_from = False, 0
        self._choose_shown()

    def _choose_shown(self) -> None:
        """What runs in the next step: all and none in pairs of steps, or each by itself by chance."""
        if self._n_asked < PAUSE_STEPS:
            self.shown = dict.fromkeys((self.keys[name] for name in self._suspects), None)
            return
        if (self._n_asked - PAUSE_STEPS) % 2 and not self._is_apart:
            self.shown = {key: self._others.get(key) for key in self.shown}
            return
        at_key: dict[int, list[int]] = {}
        for name in self._suspects:
            at_key.setdefault(self.keys[name], []).append(name)
        chosen = {key: self._chance.choice(names) for key, names in at_key.items()}
        together = self._chance.random() < 0.5
        is_on = {key: self._chance.random() < 0.5 if self._is_apart else together for key in chosen}
        self.shown = {key: name if is_on[key] else None for key, name in chosen.items()}
        self._others = {key: None if is_on[key] else name for key, name in chosen.items()}

    def _follow(self, ran: Collection[int]) -> Slow | None:
        """A step of the experiment: first of all suspects together; once they are proven slow, of each by itself."""
        self._n_asked += 1
        self._n_without += not any(name in ran for name in self._suspects)
        n_asked = self._n_asked - self._apart_from
        slow = None
        if self._n_without < PAUSE_STEPS:
            if self._n_asked >= PATIENCE_STEPS:  # plans do not reach the ranks: nothing can be found out now
                self._end()
        elif not self._is_slow(self._suspects, ASKED if self._is_apart else LIMIT):
            if self._is_apart or n_asked >= MOST_STEPS or (n_asked >= LEAST_STEPS and self._is_hopeless()):
                self._acquit()
        elif not self._is_apart and len(self._suspects) > 1:
            self._is_apart, self._apart_from = True, self._n_asked
        else:
            guilty = [name for name in self._suspects if self._is_slow([name])]
            if not guilty and n_asked >= APART_STEPS:
                guilty = [name for name in self._suspects if self._is_slow([name], 1.0)] or self._suspects
            slow = self._convict(guilty) if guilty else None
        if not self._suspects:
            self._end()
        else:
            self._choose_shown()
        return slow

    def _is_slow(self, names: Collection[int], limit: float = LIMIT) -> bool:
        mean, doubt = self._effect(names)
        return mean > max(limit * doubt, LEAST_SLOWDOWN if limit > 1.0 else 0.0)

    def _is_hopeless(self) -> bool:
        mean, doubt = self._effect(self._suspects)
        return mean < max(doubt, LEAST_SLOWDOWN)

    def _convict(self, guilty: list[int]) -> Slow:
        """As slow as medians say: what the regression says of what is very slow is too little, as it clips steps."""
        without = [log_us for log_us, ran in self._recent if ran.isdisjoint(guilty)]
        with_it = [log_us for log_us, ran in self._recent if not ran.isdisjoint(guilty)][-len(without) :]
        believed = {name: self._effect([name])[0] for name in guilty}
        together = self._effect(guilty)[0]
        seen = median(with_it) - median(without) if with_it and without else together
        scale = max(1.0, seen / together)
        relative = sum(math.expm1(scale * believed[name]) * self._n_with.pop(name, 0.0) for name in guilty)
        excess_us = max(0.0, relative) * math.exp(self.effects.expected({}))
        self._suspects = [name for name in self._suspects if name not in guilty]
        self.effects.forget([*guilty, *(_of_key(self.keys[name]) for name in guilty)])
        return Slow(guilty, 100.0 * math.expm1(scale * together), excess_us, len(with_it), len(without))

    def _acquit(self) -> None:
        """Something else slowed steps down, unless too little was seen of these to know."""
        mean, doubt = self._effect(self._suspects)
        if not self._is_apart and mean + INNOCENT * doubt < self._predicted:
            for key in {self.keys[name] for name in self._suspects}:
                n_times = self._innocent.get(key, (0, 0))[1]
                self._innocent[key] = self._n_steps + INNOCENT_REST_STEPS * 2**n_times, n_times + 1
        self._end()

    def _end(self) -> None:
        self._suspects, self.shown = [], {}


def _of_key(key: int) -> int:
    """Name of what settings at a key have in common."""
    return -1 - key % N_PLACES


WATCH_STEPS: Final = 60
"""Steps in which what was promoted is still compared with what ran before it."""


class GuardedPlans:
    """Feeds a `StepGuard` with what each step ran beside what was usual.

    Args:
        policy: whose trials and leads pause and are withdrawn.
        plans: what ran under which epoch.
        rest_steps: a key whose trial slowed steps down tries nothing for this long, then for twice as long, and so on.
    """

    def __init__(self, policy: Policy, plans: PlanBook, rest_steps: int) -> None:
        self._policy = policy
        self._plans = plans
        self._rest_steps = rest_steps
        self._guard = StepGuard()
        self._usual: Ints = np.zeros(0, np.int64)
        """By key, the slot that what is tried there is compared with."""
        self._promoted: dict[int, tuple[int, int]] = {}
        """By key whose incumbent is still compared with the one before: its slot, and for how many steps by now."""

    @property
    def effects(self) -> StepEffects:
        """The regression of step time."""
        return self._guard.effects

    @property
    def is_asking(self) -> bool:
        """It is being found out what slows steps down."""
        return bool(self._guard.suspects)

    @property
    def shown(self) -> Mapping[int, int | None]:
        """What runs in the next step by key: one of the suspects, or what ran before it (None)."""
        return self._guard.shown

    @property
    def promoted(self) -> Collection[int]:
        """Keys at which something was promoted lately."""
        return self._promoted.keys()

    def reset(self) -> None:
        """All is asked anew."""
        self._guard.reset()
        self._usual = np.zeros(0, np.int64)
        self._promoted.clear()
        self._policy.show({}, ())

    def step(
        self,
        in_force: PlanInForce,
        step: int,
        duration_us: float,
        states: Sequence[KeyState],
        evidence: CallEvidence,
        unsaved_shift: float,
        *,
        arm: int | None = None,
    ) -> float | None:
        """Take in one step.

        Args:
            in_force: plan of the step.
            step: its number.
            duration_us: as recorded.
            states: of all keys, by key index.
            evidence: of the regime in force.
            unsaved_shift: as in `StepGuard.paced`.
            arm: name of the variant on trial, if there is one.

        Returns:
            By how much (log) training's own pace has changed, if it has.
        """
        explored = self._explored(in_force, states, evidence)
        if arm is not None:
            self._guard.compare(math.log(duration_us), explored, arm if in_force.variant is not None else None)
            return None
        shift = self._guard.paced(math.log(duration_us), explored, unsaved_shift)
        usual = {name: evidence.log_us(int(self._usual[key])) for name, key in explored.items()}
        slow_calls = {name for name in explored if evidence.log_us(name) > usual[name]}
        slow = self._guard.step(math.log(duration_us), explored, slow_calls)
        if slow is not None:
            self._withdraw(slow, step, states, evidence)
        self._show_suspects(states, evidence)
        return shift

    # ---- inside ---------------------------------------------------------------------------------------

    def _explored(self, in_force: PlanInForce, states: Sequence[KeyState], evidence: CallEvidence) -> dict[int, int]:
        """What a plan tries, and at which key."""
        n_keys = len(states)
        new = [evidence.slot(state.index, state.incumbent) for state in states[len(self._usual) :]]
        if new:
            self._usual = np.concatenate([self._usual, np.array(new, np.int64)])
        slots = self._plans.slots(in_force.plan.epoch, n_keys, evidence)[:n_keys]
        tries = self._policy.verified(n_keys)
        tries[: len(in_force.is_trial)] |= in_force.is_trial[:n_keys]
        differs = slots != self._usual
        if in_force.variant is not None:
            differs[[*in_force.variant.changes]] = False
        for key in np.flatnonzero(differs & ~tries).tolist():
            if self._promoted.get(key, (-1, 0))[0] != slots[key]:
                self._promoted[key] = int(slots[key]), 0
        for key, (slot, n_steps) in [*self._promoted.items()]:
            if evidence.candidates[slot] != states[key].incumbent:
                del self._promoted[key]  # something else has withdrawn it, or followed it
                continue
            self._promoted[key] = slot, n_steps + 1
            before = evidence.candidates[int(self._usual[key])]
            if n_steps >= WATCH_STEPS or not self._policy.surrogate.fields.offers(states[key].family, before):
                del self._promoted[key]
                self._guard.became_usual(slot, key)
                self._usual[key], differs[key] = slot, slot != slots[key]
        tried = np.flatnonzero(differs)
        return dict(zip(slots[tried].tolist(), tried.tolist(), strict=True))

    def _show_suspects(self, states: Sequence[KeyState], evidence: CallEvidence) -> None:
        """Let keys run in the next step what the experiment asks for."""
        over = []
        for name in self._guard.suspects:
            state, candidate = states[int(evidence.key[name])], evidence.candidates[name]
            if candidate not in (state.trial, state.lead, state.incumbent):
                over.append(name)
        self._guard.dismiss(over)
        may_try = self._policy.budget.remaining_us >= 0
        shown = {key: name if may_try else None for key, name in self._guard.shown.items()}
        self._policy.show(
            {key: evidence.candidates[self._usual[key] if name is None else name] for key, name in shown.items()},
            [
                key
                for key, name in shown.items()
                if name is not None and evidence.candidates[name] != states[key].incumbent
            ],
        )

    def _withdraw(self, slow: Slow, step: int, states: Sequence[KeyState], evidence: CallEvidence) -> None:
        self._policy.budget.spend(slow.excess_us)
        rest = len(slow.names) - 1
        words = f"steps were {slow.percent:.1f} % slower with it"
        if rest:
            words += f" and {rest} more that ran at the same time"
        words += f" than without ({slow.n_with} steps against {slow.n_without}, compared in turns)"
        for name in slow.names:
            state, candidate = states[int(evidence.key[name])], evidence.candidates[name]
            if candidate in (state.trial, state.lead, state.incumbent):
                state.n_withdrawn += 1
                if candidate == state.incumbent:
                    self._promoted.pop(state.index, None)
                    before = evidence.candidates[int(self._usual[state.index])]
                    self._policy.set_incumbent(state, before, "rollback", f"{candidate}: {words}")
                self._policy.withdraw(state, candidate, words, step + self._rest_steps * 2 ** (state.n_withdrawn - 1))


YARDSTICK_STEPS: Final = 120
GUARD_WAITS_STEPS: Final = 3
"""How many steps the measurements of a step may come after its record."""
DOUBTFUL_SHARE: Final = 0.05
"""A step that lost more of its time to exploration says nothing about promotions: what it would have taken
otherwise is not known to the percent. The budget keeps such steps few.
"""
KNOWN_STEPS: Final = 14
"""So many steps are known before the first trial begins; a third of them before a canary does, whose price is that of a
catastrophe: what others learned is to be had within ten steps."""
WITHDRAWN_REST_STEPS: Final = 100
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
        self._guarded = GuardedPlans(policy, plans, WITHDRAWN_REST_STEPS)
        self._waiting: deque[StepRecord] = deque()
        self._recent: deque[tuple[float, float]] = deque(maxlen=YARDSTICK_STEPS)
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
        return self.is_comparing or self._guarded.is_asking or len(self._recent) < KNOWN_STEPS // 3

    @property
    def is_new(self) -> bool:
        """Too few steps are known to guard other trials by than canaries."""
        return len(self._recent) < KNOWN_STEPS

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
