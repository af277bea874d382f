"""What step times say: linear regressions by one Kalman filter each, over log step times.

`StepEffects` follows their level, which may drift, and on top of it the effect of every setting on trial or lead that
ran in the step. How much of a step's noise the next one shares is learned: where times wander by themselves, only what
comes and goes with the windows of a setting is its doing. `StepKinds` tells steps apart that differ anyway.
`TrainingModel` learns what calls and the channels they hold cost training.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from zerotune.store.records import BASELINE
from zerotune.tuner.learning.policy.keys import KeyState
from zerotune.tuner.learning.policy.observations import CallEvidence
from zerotune.tuner.modeling.features import Floats, Ints


class KalmanFilter:
    """Means and covariance of quantities by place, in the order in which they were added; independent at first."""

    def __init__(self) -> None:
        self.mean = np.zeros(0)
        self.covariance = np.zeros((0, 0))

    def add(self, *variances: float) -> int:
        """Quantities of mean 0 and these variances; where the first of them stands."""
        place = len(self.mean)
        self.mean = np.append(self.mean, np.zeros(len(variances)))
        grown = np.diag([*np.zeros(place), *variances])
        grown[:place, :place] = self.covariance
        self.covariance = grown
        return place

    def expected(self, design: np.ndarray) -> tuple[float, float]:
        """Mean and variance of `design @ quantities`."""
        return float(design @ self.mean), max(0.0, float(design @ self.covariance @ design))

    def observe(self, design: np.ndarray, value: float, noise: float, *, clip: float = math.inf) -> tuple[float, float]:
        """Take in an observation: `design @ quantities` was `value`, give or take `noise`.

        Args:
            design: weights of the quantities, shape [n].
            value: observed.
            noise: standard deviation of the observation, positive.
            clip: a value further off than this many standard deviations is pulled in.

        Returns:
            By how much the value, as pulled in, differed from what was expected, and the variance of that.
        """
        along = self.covariance @ design
        variance = float(design @ along) + noise**2
        limit = clip * math.sqrt(variance)
        surprise = min(max(value - float(design @ self.mean), -limit), limit)
        self.mean += along * (surprise / variance)
        self.covariance -= np.outer(along, along) / variance
        return surprise, variance


OF_KEY: Final = 1.0
"""Prior standard deviation, in noise scales, of what trying anything at a key does to a step."""
OF_SETTING: Final = 0.7
"""Prior standard deviation, in noise scales, of what a setting adds to its key's effect."""
MOST_EFFECTS: Final = 128
"""With more, settings that come new share what is known of their key: work per step is bounded."""
NOISE: Final = 0.01
NOISE_WEIGHT: Final = 10.0
"""Noise (log) of steps before anything is known, and how many of them that opinion weighs."""
NOISE_FLOOR: Final = 0.003
LEAST_DRIFT: Final = 0.0003
"""The level moves by no less (log) from one step to the next, and by no more than the noise."""
FOLLOWS: Final = 0.1
"""How fast what is thought of the drift follows what neighbouring steps have in common."""
IN_COMMON: Final = 0.05
"""So much correlation of neighbouring surprises is left to chance."""
MOST_OF_ONE: Final = 4.0
"""What a single step may say, in noise scales: a straggling one must not pass for a slow setting."""
CHANGED: Final = 0.02
"""By how much (log) the level may move as something that no step has spoken of becomes an incumbent."""
KEPT_STEPS: Final = 120
"""A setting that did not run for this many steps is forgotten."""
KEY_KEPT_STEPS: Final = 2000
"""A key that tried nothing for this many steps is forgotten."""


class StepEffects:
    """Effects (log, positive = slower) on steps by name: 0 and above for settings, below 0 for what they share."""

    def __init__(self) -> None:
        self._state = KalmanFilter()
        """The level of log step times, then the effects."""
        self._state.add(1.0)
        self._places: dict[int, int] = {}
        self._ran_at: dict[int, int] = {}
        self._n_steps = 0
        self._squares = NOISE_WEIGHT * NOISE**2
        self._weight = NOISE_WEIGHT
        self._log_drift = math.log(LEAST_DRIFT)
        self._surprise = 0.0

    @property
    def noise(self) -> float:
        """Standard deviation of a step (log) around its level."""
        return max(NOISE_FLOOR, math.sqrt(self._squares / self._weight))

    @property
    def drift(self) -> float:
        """Standard deviation of how far (log) the level moves from one step to the next."""
        return min(math.exp(self._log_drift), self.noise)

    def effect(self, shares: Mapping[int, float]) -> tuple[float, float]:
        """Mean and standard deviation of what steps take longer with all of these together."""
        mean, variance = self._state.expected(self._design(shares, level=0.0))
        return mean, math.sqrt(variance)

    def know(self, name: int, std: float) -> None:
        """What this adds to a step is asked anew: it may be as large as `std` (log)."""
        self.forget([name])
        self._places[name] = self._state.add(std**2)
        self._ran_at[name] = self._n_steps

    def expected(self, shares: Mapping[int, float]) -> float:
        """Log duration of a step with these."""
        return self._state.expected(self._design(shares, level=1.0))[0]

    def step(self, log_us: float, shares: Mapping[int, float]) -> None:
        """Take in one step.

        Args:
            log_us: log duration.
            shares: how often each named effect was in the step.
        """
        state = self._state
        if self._n_steps == 0:
            state.mean[0] = log_us
        self._n_steps += 1
        for name in shares:
            self._ran_at[name] = self._n_steps
            if name not in self._places and (name < 0 or len(self._places) < MOST_EFFECTS):
                scales = OF_SETTING if name >= 0 else OF_KEY
                self._places[name] = state.add((scales * self.noise) ** 2)
        state.covariance[0, 0] += self.drift**2
        design = self._design(shares, level=1.0)
        expected, variance = state.expected(design)
        # What is known of faster settings counts; how slow a step may seem is measured without the slower ones.
        fast = float(np.minimum(design[1:] * state.mean[1:], 0.0).sum())
        most = state.mean[0] + fast + MOST_OF_ONE * math.sqrt(self.noise**2 + state.covariance[0, 0])
        value = min(log_us, max(most, expected))
        surprise, variance = state.observe(design, value, self.noise, clip=MOST_OF_ONE)
        self._squares += surprise**2 * self.noise**2 / variance
        self._weight += 1.0
        scaled = surprise / math.sqrt(variance)
        self._log_drift += FOLLOWS * (scaled * self._surprise - IN_COMMON)
        self._log_drift = min(max(self._log_drift, math.log(LEAST_DRIFT)), math.log(self.noise))
        self._surprise = scaled
        if self._n_steps % KEPT_STEPS == 0:
            self._forget(
                lambda name: self._n_steps - self._ran_at[name] > (KEPT_STEPS if name >= 0 else KEY_KEPT_STEPS)
            )

    def became_usual(self, shares: Mapping[int, float], others: Collection[int]) -> None:
        """What runs as `shares` is an incumbent from now on; what is known of these and of `others` is asked anew."""
        state = self._state
        known = [self._places[name] for name in shares if name in self._places]
        if len(known) < len(shares):
            state.covariance[0, 0] += CHANGED**2
        state.mean[0] += state.mean[known].sum()
        state.covariance[0] += state.covariance[known].sum(axis=0)
        state.covariance[:, 0] += state.covariance[:, known].sum(axis=1)
        self._forget(lambda name: name in shares or name in others)

    def level_moved(self, shift: float = 0.0) -> None:
        """Training has another pace: what steps take without anything on trial is asked anew."""
        self._state.mean[0] += shift
        self._state.covariance[0, 0] += CHANGED**2

    def forget(self, names: Collection[int]) -> None:
        """These do not run any more."""
        self._forget(lambda name: name in names)

    # ---- inside ---------------------------------------------------------------------------------------

    def _design(self, shares: Mapping[int, float], *, level: float) -> np.ndarray:
        design = np.zeros(len(self._state.mean))
        design[0] = level
        for name, share in shares.items():
            if name in self._places:
                design[self._places[name]] = share
        return design

    def _forget(self, is_over: Callable[[int], bool]) -> None:
        kept = [name for name in self._places if not is_over(name)]
        at = [0, *(self._places[name] for name in kept)]
        self._state.mean = self._state.mean[at]
        self._state.covariance = self._state.covariance[np.ix_(at, at)]
        self._places = {name: place for place, name in enumerate(kept, start=1)}
        self._ran_at = {name: self._ran_at[name] for name in kept}


WIDTH: Final = 0.2
"""Steps within this much (log bytes) are of one kind."""
NEIGHBOURS: Final = 40
"""Steps of other kinds count for as long."""
COMPARED: Final = 9
"""So many of them, the newest."""
OFTEN: Final = 6
"""The first kind of this many steps is the yardstick: two of validation may come before training."""
ENOUGH: Final = 3
"""Steps of another kind before it is known how it differs."""
REMEMBERED: Final = 20
MOST_KINDS: Final = 32
LEAST_DIFFERENCE: Final = 0.03
"""Less (log) is noise."""
NOTHING_SEEN: Final = 0
"""The kind of steps that enqueue nothing: a replayed graph, or nobody listened yet. It is no yardstick."""
MOST_UNJUDGED: Final = 1024
"""Steps that have begun, but not finished, as far as is known."""


class _Step(NamedTuple):
    kind: int
    log_us: float
    """As long as it would have taken as one of the yardstick's kind."""


class StepKinds:
    """One job's steps; `enqueued` tells what they move, `usual_us` how long they would have taken as usual ones."""

    def __init__(self) -> None:
        self._bytes: dict[int, float] = {}
        self._newest: deque[_Step] = deque(maxlen=NEIGHBOURS)
        self._yardstick: int | None = None
        self._differences: dict[int, deque[float]] = {}
        """Of the other kinds."""

    def enqueued(self, steps: Ints, message_bytes: Ints) -> None:
        """Calls of rank 0, shape [n] each: the steps in which they were enqueued and what they move."""
        when, of = np.unique(steps, return_inverse=True)
        for step, moved in zip(when.tolist(), np.bincount(of, message_bytes).tolist(), strict=True):
            self._bytes[step] = self._bytes.get(step, 0.0) + moved
        while len(self._bytes) > MOST_UNJUDGED:
            del self._bytes[next(iter(self._bytes))]

    def usual_us(self, step: int, duration_us: float) -> float | None:
        """A step's duration, which is above 0, as one of the usual kind; None where too little is known of its own."""
        kind = round(math.log(max(1.0, self._bytes.pop(step, 0.0))) / WIDTH)
        log_us = math.log(duration_us)
        if self._yardstick is None:
            self._newest.append(_Step(kind, log_us))
            alike = [one for one in self._newest if one.kind == kind]
            if kind != NOTHING_SEEN and len(alike) >= OFTEN:
                self._yardstick, self._newest = kind, deque(alike, NEIGHBOURS)
            return duration_us
        if kind != self._yardstick:
            difference = self._difference(kind, log_us)
            if difference is None:
                return None
            log_us -= difference if abs(difference) > LEAST_DIFFERENCE else 0.0
        self._newest.append(_Step(kind, log_us))
        return math.exp(log_us)

    def _difference(self, kind: int, log_us: float) -> float | None:
        """How much longer (log) steps of another kind than the yardstick's take, by this step, too."""
        if kind not in self._differences:
            if len(self._differences) >= MOST_KINDS:
                return None
            self._differences[kind] = deque(maxlen=REMEMBERED)
        known = self._differences[kind]
        others = [one.log_us for one in self._newest if one.kind != kind][-COMPARED:]
        if others:
            known.append(log_us - median(others))
        return median(known) if len(known) >= ENOUGH else None


SHARED_TOLL: Final = 0.007
"""How much (log) one channel may slow computation down, before any step has spoken: 16 of them about a ninth."""
OWN_TOLL: Final = 0.012
"""How far a group's toll may be from what all have in common."""
EXPOSURE: Final = 0.35
"""How far a group's exposure may be from that of all communication, which is measured."""
EXPOSURE_MEASURED_TO: Final = 0.05
DRIFT: Final = 0.001
"""How far (log) the level of steps moves from one to the next."""
CLIP: Final = 3.0
"""A step further off than this many standard deviations is pulled in."""


class Load(NamedTuple):
    """What a group's calls take of a step, or how much more."""

    calls_us: float = 0.0
    held_us: float = 0.0
    """Channels times how long they are held."""


class TrainingModel:
    """Exposure and toll of groups of keys, by name."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._state = KalmanFilter()
        """The level; the toll of all groups; then of each group its exposure and toll, as they differ from all's."""
        self._state.add(1.0, SHARED_TOLL**2)
        self._n_steps = 0

    def know_groups(self, shares: Mapping[str, float]) -> None:
        """Groups and the share of a step they run: where one is more exposed than all together, others are less."""
        if all(name in self._places for name in shares):
            return
        in_all = self._design({name: Load(share) for name, share in shares.items()}, 1.0)
        self._state.observe(in_all, 0.0, EXPOSURE_MEASURED_TO)

    def step(self, duration_us: float, loads: Mapping[str, Load], exposed_share: float, noise: float) -> None:
        """Take in a step.

        Args:
            duration_us: of the step.
            loads: by group, how much more its calls take than with NCCL's own choices.
            exposed_share: of all communication, between 0 and 1.
            noise: standard deviation of a step (log).
        """
        state = self._state
        value = math.log(duration_us) - exposed_share * sum(load.calls_us for load in loads.values()) / duration_us
        design = self._design(loads, duration_us)
        design[0] = 1.0
        if self._n_steps == 0:
            state.mean[0] = value
        self._n_steps += 1
        state.covariance[0, 0] += DRIFT**2
        state.observe(design, value, noise, clip=CLIP)

    def expected(self, loads: Mapping[str, Load], step_us: float, exposed_share: float) -> tuple[float, float]:
        """What a step gains by these loads.

        Args:
            loads: how much more the calls of each group take.
            step_us: of a step without them.
            exposed_share: of all communication, between 0 and 1.

        Returns:
            Mean and standard deviation (log, positive = faster).
        """
        differs, variance = self._state.expected(self._design(loads, step_us))
        as_if_all = exposed_share * sum(load.calls_us for load in loads.values()) / step_us
        return -math.log1p(max(-0.5, as_if_all)) - differs, math.sqrt(variance)

    def of_group(self, name: str, exposed_share: float) -> tuple[float, float, float]:
        """What a microsecond of a group's calls costs: whatever the channels; for each channel, with its doubt."""
        design = self._design({name: Load(0.0, 1.0)}, 1.0)
        toll, variance = self._state.expected(design)
        exposure = exposed_share + float(self._state.mean[self._places[name]])
        return min(max(exposure, 0.0), 1.0), toll, math.sqrt(variance)

    def _design(self, loads: Mapping[str, Load], step_us: float) -> Floats:
        places = [self._place(name) for name in loads]
        design = np.zeros(len(self._state.mean))
        for place, load in zip(places, loads.values(), strict=True):
            design[1] += load.held_us / step_us
            design[place : place + 2] = load.calls_us / step_us, load.held_us / step_us
        return design

    def _place(self, name: str) -> int:
        if name not in self._places:
            self._places[name] = self._state.add(EXPOSURE**2, OWN_TOLL**2)
        return self._places[name]


class PlanLoads:
    """What plans' calls take of a step according to measurements; `refresh` now and then, cheap in between."""

    def __init__(self) -> None:
        self._base: Ints = np.zeros(0, np.int64)
        """Slot of NCCL's own choice, by key."""
        self._rates: Floats = np.zeros(0)
        self._groups: list[str] = []
        self._group: Ints = np.zeros(0, np.int64)
        """Of each key, its place among `_groups`."""

    def refresh(self, states: Sequence[KeyState], evidence: CallEvidence, rates: Floats) -> None:
        """Take in new keys.

        Args:
            states: of all keys, by key index.
            evidence: of the regime in force.
            rates: calls per step, by key index.
        """
        for state in states[len(self._base) :]:
            if group_of(state) not in self._groups:
                self._groups.append(group_of(state))
        self._base = np.array([evidence.slot(state.index, BASELINE) for state in states], np.int64)
        self._group = np.array([self._groups.index(group_of(state)) for state in states], np.int64)
        self._rates = np.concatenate([rates, np.zeros(max(0, len(states) - len(rates)))])

    def of_plan(self, slots: Ints, states: Sequence[KeyState], evidence: CallEvidence) -> tuple[float, dict[str, Load]]:
        """What a plan changes of a step against NCCL's own choices.

        Args:
            slots: that it asked every key to run.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            What its faster calls save together (us), and how much more it loads steps with, by group.
        """
        n_keys = min(len(slots), len(self._base))
        differ = np.flatnonzero(slots[:n_keys] != self._base[:n_keys])
        now, base, rates = slots[differ], self._base[differ], self._rates[differ]
        now_us, base_us = (np.exp(evidence.centre(some)) for some in (now, base))
        is_known = np.isfinite(now_us + base_us)
        more_us = np.where(is_known, now_us - base_us, 0.0) * rates
        ran, left = (self._channels(some, states, evidence) for some in (now, base))
        held_us = np.where(is_known, ran * now_us - left * base_us, 0.0) * rates
        by_group = (np.bincount(self._group[differ], some, len(self._groups)) for some in (more_us, held_us))
        loads = {name: Load(*load) for name, *load in zip(self._groups, *by_group, strict=True) if any(load)}
        return float(np.maximum(-more_us, 0.0).sum()), loads

    def _channels(self, slots: Ints, states: Sequence[KeyState], evidence: CallEvidence) -> Ints:
        return np.array(
            [states[int(evidence.key[at])].channels_of(evidence.candidates[at]) for at in slots.tolist()], np.int64
        )

    def running_us(self, states: Sequence[KeyState], evidence: CallEvidence) -> dict[str, float]:
        """How long the incumbents of each group run per step."""
        known = states[: len(self._base)]
        slots = np.array([evidence.slot(state.index, state.incumbent) for state in known], np.int64)
        us = np.nan_to_num(np.exp(evidence.centre(slots))) * self._rates[: len(known)]
        return dict(zip(self._groups, np.bincount(self._group[: len(known)], us, len(self._groups)), strict=True))


def group_of(state: KeyState) -> str:
    """Keys whose calls cost training alike."""
    return f"{state.key.collective.name} in {state.key.phase.name}"
