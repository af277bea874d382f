"""Compares steps with and without what is on trial, leads or was promoted lately, and tells what slows them down.

Calls may get faster and steps slower. So every step adds to a regression of what each setting does to steps
(`step_effects.py`). What that says is a suspicion only: settings come and go for reasons of their own, and training
changes by itself. It is settled by an experiment. The suspects pause for a few steps, and then run by chance, all
together; if that proves several to be slow together, each runs by its own chance, which tells them apart.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

from zerotune.tuner.learning.policy.steps.step_effects import StepEffects

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
REST_STEPS: Final = 25
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
                self._innocent[key] = self._n_steps + REST_STEPS * 2**n_times, n_times + 1
        self._end()

    def _end(self) -> None:
        self._suspects, self.shown = [], {}


def _of_key(key: int) -> int:
    """Name of what settings at a key have in common."""
    return -1 - key % N_PLACES
