"""Compares steps with and without what is on trial, leads or was promoted lately, and tells what slows them down.

Calls may get faster and steps slower. So steps with and without what explores are compared as it takes turns
(`step_effects.py`). Where steps seem slower with it, all that is suspected *pauses* for a few steps. That costs nothing
where it is guilty and little where it is not, and tells the two apart, whatever else wanders: only if steps recover
is it withdrawn. One suspicion is of everything that explores together, so that many that each add a little are caught,
others of each by itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from statistics import fmean, median
from typing import Final, NamedTuple

from zerotune.tuner.learning.policy.steps.step_effects import ALL, MOST_OF_ONE, StepEffects

ASKED: Final = 2.0
"""Standard deviations by which steps must seem slower with what explores for it to pause."""
LIMIT_TOGETHER: Final = 3.0
"""Standard deviations after the pause for which several settings together are withdrawn."""
LIMIT_ALONE: Final = 3.3
"""Standard deviations after the pause for which one setting, suspected by itself, is withdrawn."""
LEAST_SLOWDOWN: Final = 0.004
"""Less (log) is not worth asking."""
LEAST_WITH: Final = 2
"""Steps with what is suspected: one is a straggler."""
PAUSE_STEPS: Final = (3, 12)
"""Least and most steps of a pause: until there is a verdict, or none is likely."""
PAUSE_SCALES: Final = 4.0
CONFIRMED: Final = 0.5
"""Least share of the suspected slowdown by which steps must recover."""
CONFIRMED_SCALES: Final = 1.5
"""Least standard errors by which steps must recover."""
CONTRADICTED_SCALES: Final = 2.0
"""The suspicion was wrong where steps recover by this many standard errors less than was suspected."""
MEDIAN_COSTS: Final = 1.25
"""Standard error of a median over that of a mean."""
COMPARED_STEPS: Final = 12
GUILTY_ALONE: Final = 3.0
"""Of several settings suspected together, those with an effect of this many standard deviations are withdrawn. If there
is none, one half of them runs alone first.
"""
GUILTY_HALF: Final = 2.0
"""A half with an effect of this many standard deviations is withdrawn."""
PROBE_STEPS: Final = 4
PROBE_PATIENCE_STEPS: Final = 20
"""Steps with the one half, and the most steps to wait for these."""
REST_STEPS: Final = 25
"""What is not proven guilty does not pause again for this long, unless that is likely by then; what turned out to be
innocent does not in any case, and for twice as long after each further time.
"""
MOST_OF_IT: Final = 0.5
"""A step with this much of what is suspected is one with it."""
N_PLACES: Final = 48
"""With more keys some share what is known of them: what each does to a step is little, and work per step is bounded."""
MOST_ALONE: Final = 32
"""So many settings are suspected by themselves in one step; with more they take turns."""
PATIENCE_STEPS: Final = 100
"""A pause that does not come about is over after this many steps."""
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


class _Suspicion(NamedTuple):
    names: list[int]
    keys: frozenset[int]
    predicted: float
    limit: float
    n_pause: int
    since_step: int
    with_it: list[float]
    without: list[float]


class _Odd(NamedTuple):
    shift: float
    names: frozenset[int]


class _Proven(NamedTuple):
    """Several settings together make steps slower."""

    slow: Slow
    effects: dict[int, float]
    """By name."""
    usual_log_us: float


class _Probe(NamedTuple):
    proven: _Proven
    keys: frozenset[int]
    """Those of the half that stays out."""
    out: list[int]
    others: list[int]
    since_step: int


class StepGuard:
    """One job's steps; `step` answers with what is to be withdrawn. Settings have names, and keys of their own."""

    def __init__(self) -> None:
        self.reset()

    @property
    def paused(self) -> frozenset[int]:
        """Keys that show their incumbents until it is known whether what they try slows steps down."""
        asked = self._suspicion or self._probe
        return asked.keys if asked is not None else frozenset()

    def reset(self) -> None:
        """All is asked anew."""
        self.effects = StepEffects()
        self._suspicion: _Suspicion | None = None
        self._probe: _Probe | None = None
        self._n_probed = 0
        self._recent: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=2 * COMPARED_STEPS)
        self._n_steps = 0
        self._n_with: dict[int, float] = {}
        self._odd: list[_Odd] = []
        """The newest steps, as long as all are off to one side."""
        self.keys: dict[int, int] = {}
        """Of every setting that was tried."""
        self._rests: dict[int, int] = {}
        """By key, until when it pauses for good reasons only."""
        self._innocent: dict[int, tuple[int, int]] = {}
        """By key, until when it is not suspected, and how often it turned out to be innocent."""

    def paced(self, log_us: float, explored: Mapping[int, int], unsaved_shift: float) -> float | None:
        """Whether training's own pace has changed.

        Several steps in a row are off, and nothing that is tried ran in all of them. Where something did and steps are
        slower, it pauses, and then it is known; where they are faster, only what is new may be why.

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
        if not is_odd or self._n_steps < COMPARED_STEPS:
            return None
        self._odd = [*self._odd, _Odd(shift, frozenset(explored))][-N_IN_A_ROW:]
        if len(self._odd) < N_IN_A_ROW:
            return None
        found = median(one.shift for one in self._odd)
        in_all = frozenset.intersection(*(one.names for one in self._odd))
        if found < 0.0:
            in_all = frozenset(name for name in in_all if self._n_with.get(name, 0.0) <= 2 * N_IN_A_ROW)
        if in_all:
            if found > 0.0 and not self.paused:
                self._ask(sorted(in_all), found, limit=0.0)
            return None
        self._odd.clear()
        if self._suspicion is not None:
            self._acquit(self._suspicion)
            self._end(self._suspicion)
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
        self.effects.step(log_us, self._shares(explored) | ({} if arm is None else {arm: 1.0}), 0.0)

    def step(self, log_us: float, explored: Mapping[int, int], doubt: float = 0.0) -> Slow | None:
        """Take in one step.

        Args:
            log_us: log duration, without what exploring cost it according to its calls.
            explored: key index by name (slot) of each setting that was tried in it.
            doubt: standard deviation (log) of what was taken off.

        Returns:
            What is to be withdrawn, if anything.
        """
        self._n_steps += 1
        self.keys.update(explored)
        shares = self._shares(explored)
        self.effects.step(log_us, shares, doubt)
        self._recent.append((log_us, tuple(explored)))
        for name in explored:
            self._n_with[name] = self._n_with.get(name, 0.0) + 1.0
        if self._probe is not None:
            return self._tell_apart(self._probe, explored)
        if self._suspicion is None:
            if explored:
                self._suspect(explored)
            return None
        return self._follow(self._suspicion, log_us, explored)

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
            for shared in (ALL, _of_key(self.keys[name])):
                shares[shared] = shares.get(shared, 0.0) + 1.0
        return shares

    def _effect(self, names: Iterable[int]) -> tuple[float, float]:
        return self.effects.effect(self._shares(names))

    def _suspect(self, explored: Iterable[int]) -> None:
        """Begin a pause if steps seem slower with what ran in this one."""
        asked = [
            name
            for name in explored
            if self._n_with[name] >= LEAST_WITH and self._n_steps >= self._innocent.get(self.keys[name], (0, 0))[0]
        ]
        rests = any(self._n_steps < self._rests.get(self.keys[name], 0) for name in asked)
        best: list[int] = []
        predicted, limit, most = 0.0, 0.0, 1.0 if rests else ASKED / LIMIT_TOGETHER
        at = self._n_steps * MOST_ALONE % max(1, len(asked))
        alone = [*asked[at:], *asked[:at]][:MOST_ALONE]
        for group, needed in [(asked, LIMIT_TOGETHER), *(([name], LIMIT_ALONE) for name in alone)]:
            mean, doubt = self._effect(group)
            if group and mean > LEAST_SLOWDOWN and mean / (needed * doubt) > most:
                best, predicted, limit, most = group, mean, needed, mean / (needed * doubt)
        if best:
            self._ask(best, predicted, limit)

    def _ask(self, names: list[int], predicted: float, limit: float) -> None:
        """Let these pause."""
        n_telling = math.ceil((PAUSE_SCALES * self.effects.noise / predicted) ** 2)
        n_pause = min(max(n_telling, PAUSE_STEPS[0]), PAUSE_STEPS[1])
        keys = frozenset(self.keys[name] for name in names)
        self._suspicion = _Suspicion(names, keys, predicted, limit, n_pause, self._n_steps, [], [])
        for log_us, ran in self._recent:
            self._compare(self._suspicion, log_us, ran)

    def _compare(self, suspicion: _Suspicion, log_us: float, ran: Iterable[int]) -> None:
        """Note what a step took but for the effects of everything else, where it ran most of what is suspected."""
        here = [name for name in ran if name in suspicion.names]
        if here and self._effect(here)[0] >= MOST_OF_IT * self._effect(suspicion.names)[0]:
            suspicion.with_it.append(log_us - self._effect(name for name in ran if name not in suspicion.names)[0])

    def _follow(self, suspicion: _Suspicion, log_us: float, ran: Iterable[int]) -> Slow | None:
        """Steps during a pause."""
        if not any(self.keys[name] in suspicion.keys for name in ran):
            suspicion.without.append(log_us - self._effect(ran)[0])
        elif self._n_steps - suspicion.since_step > PATIENCE_STEPS:
            self._end(suspicion)
            return None
        else:
            self._compare(suspicion, log_us, ran)
        if len(suspicion.without) < suspicion.n_pause:
            return None
        with_it, without = suspicion.with_it[-COMPARED_STEPS:], suspicion.without
        if not with_it:
            self._end(suspicion)
            return None
        mean, doubt = self._effect(suspicion.names)
        slowdown = self._slowdown(with_it, without)
        error = MEDIAN_COSTS * self.effects.noise * math.sqrt(1.0 / len(with_it) + 1.0 / len(without))
        seems_slow = mean > suspicion.limit * doubt
        recovers = slowdown > max(CONFIRMED * suspicion.predicted, CONFIRMED_SCALES * error, LEAST_SLOWDOWN)
        if not (seems_slow and recovers):
            if mean < max(ASKED * doubt, LEAST_SLOWDOWN) or len(without) >= PAUSE_STEPS[1]:
                if seems_slow and slowdown + CONTRADICTED_SCALES * error < suspicion.predicted:
                    self._acquit(suspicion)
                self._end(suspicion)
            return None
        scale = slowdown / mean
        slow = Slow([], 100.0 * math.expm1(slowdown), 0.0, len(with_it), len(without))
        proven = _Proven(slow, {name: self._effect([name])[0] * scale for name in suspicion.names}, median(without))
        guilty = [name for name in suspicion.names if self._is_guilty([name], GUILTY_ALONE)]
        if guilty or len(suspicion.names) == 1:
            return self._convict(proven, guilty or suspicion.names)
        # They ran in the same steps: now those that seem worse stay out while the others show themselves.
        worse_first = sorted(suspicion.names, key=lambda name: -proven.effects[name])
        half = (len(worse_first) + 1) // 2
        keys = frozenset(self.keys[name] for name in worse_first[:half])
        others = [name for name in worse_first[half:] if self.keys[name] not in keys]
        self._probe = _Probe(proven, keys, [name for name in worse_first if name not in others], others, self._n_steps)
        self._suspicion, self._n_probed = None, 0
        return None

    def _slowdown(self, with_it: list[float], without: list[float]) -> float:
        """By how much (log) steps were slower, by their medians and by their means, whichever is less.

        Stragglers move means, and where steps are of two lengths a few more of one kind turn a median over.
        """
        most = MOST_OF_ONE * self.effects.noise
        middles = median(with_it), median(without)
        means = (
            fmean(min(max(one, middle - most), middle + most) for one in some)
            for some, middle in zip((with_it, without), middles, strict=True)
        )
        return min(middles[0] - middles[1], next(means) - next(means))

    def _tell_apart(self, probe: _Probe, ran: Collection[int]) -> Slow | None:
        """Steps in which only one half of those that made steps slower together may run."""
        self._n_probed += any(name in ran for name in probe.others) and not any(name in ran for name in probe.out)
        if self._n_probed < PROBE_STEPS and self._n_steps - probe.since_step < PROBE_PATIENCE_STEPS:
            return None
        self._probe = None
        guilty = [
            name for half in (probe.out, probe.others) if half and self._is_guilty(half, GUILTY_HALF) for name in half
        ]
        return self._convict(probe.proven, guilty or [name for name, by in probe.proven.effects.items() if by > 0.0])

    def _is_guilty(self, names: Iterable[int], limit: float) -> bool:
        mean, doubt = self._effect(names)
        return mean > limit * doubt

    def _convict(self, proven: _Proven, guilty: list[int]) -> Slow:
        self._suspicion = None
        relative = sum(math.expm1(proven.effects[name]) * self._n_with.pop(name, 0.0) for name in guilty)
        self.effects.forget(guilty)
        return proven.slow._replace(names=guilty, excess_us=max(0.0, relative) * math.exp(proven.usual_log_us))

    def _acquit(self, suspicion: _Suspicion) -> None:
        """Steps did not recover: something else slowed them down, and what is believed of these is wrong."""
        self.effects.cleared([name for name in self._shares(suspicion.names) if name != ALL])
        for key in suspicion.keys:
            n_times = self._innocent.get(key, (0, 0))[1]
            self._innocent[key] = self._n_steps + REST_STEPS * 2**n_times, n_times + 1

    def _end(self, suspicion: _Suspicion) -> None:
        self._suspicion = None
        self._rests.update(dict.fromkeys(suspicion.keys, self._n_steps + REST_STEPS))


def _of_key(key: int) -> int:
    """Name of what settings at a key have in common."""
    return ALL - 1 - key % N_PLACES
