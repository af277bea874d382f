"""Trials judged by step time alone: what a collective's own duration cannot show.

A collective that overlaps computation is not worth its own microseconds. Channels hold multiprocessors, so
the setting that is fastest alone may slow training down, and a slower one may speed it up. Once the keys
have settled, *variants* of the whole plan take turns with the plan itself, in an order drawn by chance, and are judged
by the always-valid comparison of step times: one with a group of keys back at the baseline (an audit: was
the promotion good for training?), and ones with fewer channels, or as many as they are worth.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from zerotune.store.records import BASELINE, Candidate
from zerotune.tuner.learning.policy.evidence.evidence import radius
from zerotune.tuner.learning.policy.trials.stragglers import Stragglers
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import Floats

SETTLED_STEPS: Final = 20
"""Steps without a trial before variants begin, and between them: while keys settle, they would only disturb."""
AUDIT_EVERY_STEPS: Final = 500
"""Between two audits of one group, and twice as many after each."""
CAP_EVERY_STEPS: Final = 200
"""Between two trials of one cap or fitted plan, since one may have been unlucky; twice as many after each."""
LUCK: Final = 2.6
"""Standard deviations that luck may explain. What was slower by more is not tried again in this regime."""
MAX_UNITS: Final = 96
ALPHA: Final = 0.01
STEP_NOISE: Final = 0.01
STEP_NOISE_WEIGHT: Final = 10.0
MIN_STEP_GAIN: Final = 0.002
WINDOW_STEPS: Final = 2
CLIP: Final = 3.0
CLIP_AT_LEAST: Final = 0.03
"""A step further off (log) than this many noise scales is pulled in: a checkpoint."""
MOST_STRAGGLERS: Final = 0.2
"""What more of the steps do is no exception."""
ABSURD: Final = 1.5
"""A step of this many times the usual time is no variant's doing, unless it happens again."""


class GroupChange(NamedTuple):
    """What a variant changes for one group of keys, per step."""

    extra_us: float = 0.0
    """How much longer its calls take."""
    released_us: float = 0.0
    """Channels that are held no longer, times how long."""


class Variant(NamedTuple):
    """Another setting for some keys, by key index."""

    name: str
    changes: dict[int, Candidate]
    max_channels: int | None
    """The cap it stands for, if any."""
    by_group: Mapping[str, GroupChange] = {}
    risk_us: float = 0.0
    """What it may cost per step at worst."""
    group: str = ""
    """The promotions that are audited."""
    lifts_cap: bool = False
    """Back to what ran before channels were capped."""

    @property
    def is_audit(self) -> bool:
        """Back to what ran before."""
        return bool(self.group) or self.lifts_cap

    @property
    def extra_us(self) -> float:
        """What it costs per step, as calls say."""
        return sum(change.extra_us for change in self.by_group.values())


class VariantResult(NamedTuple):
    """A variant's end: `gain` is by how much (log) steps were faster with it, `doubt` its standard deviation."""

    variant: Variant
    is_better: bool
    gain: float
    doubt: float

    @property
    def is_hopeless(self) -> bool:
        """Steps were slower than luck explains."""
        return self.gain + LUCK * self.doubt < MIN_STEP_GAIN


class StepTrials:
    """At most one variant at a time; `begin` offers them, `step` feeds measured steps."""

    def __init__(self) -> None:
        self.variant: Variant | None = None
        self.is_on = False
        self._on: list[float] = []
        self._off: list[float] = []
        """Log durations of steps with the variant, and without."""
        self._usual_us = math.inf
        """What steps take without the last variant."""
        self._stragglers = Stragglers()
        self._alpha = ALPHA
        self._n_capped = 0
        self._tried: dict[str, tuple[int, int]] = {}
        """By name, the step of its last trial and how many there were."""
        self._hopeless: set[str] = set()
        """What is not tried again in this regime."""
        self._next_at_step = 0
        self._steps_in_window = 0
        self._is_second = False
        """The window ends a pair, one with the variant and one without, in either order."""
        self._noise = STEP_NOISE
        self._chance = random.Random(0)

    def reset(self) -> None:
        """The regime changed: everything may be asked anew."""
        self.variant, self.is_on = None, False
        self._n_capped = 0
        self._tried.clear()
        self._hopeless.clear()

    def postpone(self, step: int, n_steps: int = SETTLED_STEPS) -> None:
        """Keys are still on trial, or there is nothing to try now."""
        self._next_at_step = step + n_steps

    def is_due(self, step: int) -> bool:
        """Whether a variant may begin."""
        return self.variant is None and step >= self._next_at_step

    def untried(self, variants: Sequence[Variant], step: int) -> Iterator[Variant]:
        """Those that were not tried lately; they come back, ever more rarely, unless they are hopeless."""
        for variant in variants:
            last, n_trials = self._tried.get(variant.name, (0, 0))
            every = AUDIT_EVERY_STEPS if variant.is_audit else CAP_EVERY_STEPS
            if variant.name in self._hopeless:
                continue
            if not n_trials or step - last > every * 2 ** (n_trials - 1):
                yield variant

    def begin(self, variant: Variant, step: int, noise: float = STEP_NOISE, usual_us: float = math.inf) -> None:
        """Start alternating a variant with the plan itself.

        Args:
            variant: to try.
            step: the newest step.
            noise: standard deviation (log) of the steps before.
            usual_us: duration of the steps before.
        """
        self.variant, self._noise, self._usual_us = variant, noise, usual_us
        self._begin_pair()
        self._tried[variant.name] = step, self._tried.get(variant.name, (0, 0))[1] + 1
        self._on, self._off = [], []
        self._stragglers.reset()
        if not variant.is_audit:
            self._n_capped += 1
            # All caps of a regime together are wrongly adopted with probability ALPHA.
            self._alpha = ALPHA / (self._n_capped * (self._n_capped + 1))
        else:
            self._alpha = ALPHA

    def step(self, duration_us: float, *, is_on: bool) -> tuple[float, VariantResult | None]:
        """One step of the variant or of the plan itself: (extra cost in us, the verdict if there is one)."""
        if self.variant is None or not duration_us > 0:
            return 0.0, None
        extra_us = self._extra_us(duration_us) if is_on else 0.0
        (self._on if is_on else self._off).append(math.log(duration_us))
        if is_on is self.is_on:
            self._steps_in_window += 1
            if self._steps_in_window >= WINDOW_STEPS:
                if self._is_second:
                    self._begin_pair()
                else:
                    self.is_on, self._is_second, self._steps_in_window = not self.is_on, True, 0
        return extra_us, self._verdict()

    def end(self, step: int, *, for_good: bool = False) -> None:
        """Back to the plan itself; `for_good` unless it is an audit: then it is asked again all the same."""
        if for_good and self.variant is not None and not self.variant.is_audit:
            self._hopeless.add(self.variant.name)
        self._know_usual()
        self.variant, self.is_on = None, False
        self._next_at_step = step + SETTLED_STEPS

    def late_us(self, duration_us: float) -> float:
        """What a step cost that ran with the variant after its trial had ended."""
        return max(0.0, duration_us - self._usual_us)

    def _begin_pair(self) -> None:
        """By chance, as training has periods of its own: each fourth step, a longer one, would be on one side."""
        self.is_on = self._chance.random() < 0.5
        self._is_second, self._steps_in_window = False, 0

    def _extra_us(self, duration_us: float) -> float:
        """What a step with the variant cost; less where one of before turned out to be a straggler."""
        self._know_usual()
        beyond_us = np.array([duration_us - ABSURD * self._usual_us])
        corrections = self._stragglers.corrections(np.zeros(1, np.int64), beyond_us, np.array([len(self._on)]))
        return max(0.0, duration_us - self._usual_us) + corrections.get(0, 0.0)

    def _know_usual(self) -> None:
        if self._off:
            self._usual_us = math.exp(median(self._off))

    def _verdict(self) -> VariantResult | None:
        n_on, n_off = len(self._on), len(self._off)
        if self.variant is None or min(n_on, n_off) < 2:
            return None
        on, off = _pulled_in(self._on, self._off)
        squares = n_on * on.var() + n_off * off.var() + STEP_NOISE_WEIGHT * self._noise**2
        sigma = math.sqrt(squares / (n_on + n_off - 2 + STEP_NOISE_WEIGHT))
        gain = float(off.mean() - on.mean())
        doubt = sigma * math.sqrt(1.0 / n_on + 1.0 / n_off)
        if gain - radius(n_on, n_off, sigma, self._alpha) > 0 and gain > MIN_STEP_GAIN:
            return VariantResult(self.variant, True, gain, doubt)
        if gain + 1.3 * doubt < MIN_STEP_GAIN or min(n_on, n_off) >= MAX_UNITS:
            return VariantResult(self.variant, False, gain, doubt)
        return None


def _pulled_in(on_logs: Sequence[float], off_logs: Sequence[float]) -> tuple[Floats, Floats]:
    """Both sides within the same limits: stragglers say little, and steps that scatter pass for what they are.

    With limits of its own each side would take for usual what it met first.
    """
    values = np.array([*on_logs, *off_logs])
    centre = float(np.median(values))
    off = np.abs(values - centre)
    usual = CLIP * 1.4826 * float(np.median(off)), float(np.quantile(off, 1.0 - MOST_STRAGGLERS, method="higher"))
    limit = max(CLIP_AT_LEAST, *usual)
    values = np.clip(values, centre - limit, centre + limit)
    return values[: len(on_logs)], values[len(on_logs) :]


def group_of(state: KeyState) -> str:
    """Keys whose promotions are audited together."""
    return f"{state.key.collective.name} in {state.key.phase.name}"


def audits(states: Sequence[KeyState]) -> list[Variant]:
    """Per group that has promotions, those keys back at what NCCL does; where caps were adopted, without them."""
    groups: dict[str, dict[int, Candidate]] = {}
    uncapped: dict[str, dict[int, Candidate]] = {}
    for state in states:
        if state.before_cap is not None:
            uncapped.setdefault(group_of(state), {})[state.index] = state.before_cap
        elif not state.incumbent.is_baseline:
            groups.setdefault(group_of(state), {})[state.index] = BASELINE
    return [
        *(Variant(f"{name} left to NCCL", changes, None, group=name) for name, changes in sorted(groups.items())),
        *(Variant(f"no cap for {name}", changes, None, lifts_cap=True) for name, changes in sorted(uncapped.items())),
    ]
