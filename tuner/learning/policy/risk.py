"""What exploring may cost, and what it costs: the budget, what calls are worth to training, what is reserved.

All in microseconds of training time. A key that is called once in a hundred steps may have a trial that waits as long;
hundreds of such keys may all be called in one step: what each trial was admitted for stays reserved until it is known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from ...modeling.features import Floats, Ints
from ..explaining.words import Z_90
from .keys import Traffic
from .observations import StepSums

CATASTROPHIC_RATIO: Final = 2.0
"""What takes so many times as long as the incumbent is a catastrophe: not tried again."""
LOG_CATASTROPHE: Final = math.log(CATASTROPHIC_RATIO)


WINDOW_STEPS: Final = 200
"""Exploring costs no more than the budget of all steps so far, and no more than that of any so many steps in a row."""


class Budget:
    """The one ledger: a fraction of every finished step is earned, trials reserve, what exploring cost is spent."""

    def __init__(self, fraction: float) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"budget fraction {fraction} is outside 0..1")
        self.fraction = fraction
        self.training_us = 0.0
        self.spent_us = 0.0
        self.n_steps = 0
        self._window: deque[tuple[float, float]] = deque([(0.0, 0.0)], WINDOW_STEPS)
        """What had been trained and spent when the latest steps began, the first of them first."""
        self._reserved_us: dict[int, tuple[float, float]] = {}
        """By key: what its trial may cost until it is measured, and what connecting it takes besides."""

    def earn(self, step_us: float) -> None:
        """A training step of `step_us` microseconds has finished."""
        self.training_us += step_us
        self.n_steps += 1
        self._window.append((self.training_us, self.spent_us))

    def spend(self, extra_us: float) -> None:
        """Exploration cost `extra_us` over the incumbents; negative corrects an earlier charge."""
        self.spent_us = max(0.0, self.spent_us + extra_us)

    def reserve(self, key: int, risk_us: float, once_us: float) -> None:
        """A trial begins: what it may cost until it is measured, and what connecting it takes, is set aside."""
        self._reserved_us[key] = risk_us, once_us

    def release(self, key: int) -> None:
        """The trial of a key has ended, or is measured: what it costs is spent as it comes."""
        self._reserved_us.pop(key, None)

    @property
    def reserved(self) -> list[int]:
        """Keys whose trial waits for its first measurement."""
        return [*self._reserved_us]

    @property
    def free_us(self) -> tuple[float, float]:
        """What trials may still risk, now and of all steps' budget; only the latter pays for connections."""
        risk_us = sum(risk for risk, _ in self._reserved_us.values())
        once_us = sum(once for _, once in self._reserved_us.values())
        return self.remaining_us - risk_us, self.in_all_us - risk_us - once_us

    def affords(self, risk_us: float, once_us: float) -> bool:
        """Whether a trial may risk and reserve that much."""
        now_us, in_all_us = self.free_us
        return risk_us <= now_us and risk_us + once_us <= in_all_us

    @property
    def in_all_us(self) -> float:
        """What may still be spent of all steps' budget; connecting an algorithm may take more than a window has."""
        return self.fraction * self.training_us - self.spent_us

    @property
    def remaining_us(self) -> float:
        """What may still be spent; negative after a costlier surprise than was planned for."""
        trained_us, spent_us = self._window[0]
        of_window_us = self.fraction * (self.training_us - trained_us) - (self.spent_us - spent_us)
        return min(self.in_all_us, of_window_us)


LEARNED: Final = 0.1
"""Weight of a step against those before it."""
ANY_SHARE: Final = (0.5, 0.5)
"""Mean and standard deviation of a share of which nothing is known."""


class ExposedShare:
    """Which share of what calls take computation waits for: measured, else estimated from steps' times, else unknown.

    Measured is what steps exposed to what their calls took; a step of large messages weighs more than one of small.
    Calls and the record of a step may come in either order. A step of which calls were lost seems more exposed than
    it was: exploration is then charged too much, never too little.
    """

    def __init__(self) -> None:
        self._calls_us, self._exposed_us = StepSums(), StepSums()
        """Where calls or records are lost, what came of the other kind waits in vain."""
        self._newest_step = -1
        self._sums_us: Floats | None = None
        """Of what was exposed, and of what calls took."""
        self.estimate = ANY_SHARE
        """By how much steps get longer where calls do: mean and standard deviation, which may lie beyond 0 and 1."""

    @property
    def is_measured(self) -> bool:
        """Some steps have told."""
        return self._sums_us is not None

    @property
    def share(self) -> float:
        """What it is taken for: where it is not measured, what is likely."""
        measured = self._sums_us
        return _in_0_to_1(self.estimate[0] if measured is None else float(measured[0] / measured[1]))

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most that it may be, by its 90 % bounds: 0 and 1 if nothing is known of it."""
        mean, std = self.estimate if self._sums_us is None else (self.share, 0.0)
        return _in_0_to_1(mean - Z_90 * std), _in_0_to_1(mean + Z_90 * std)

    def measured(self, steps: Ints, duration_us: Floats) -> None:
        """Take in calls: step and duration of each, shape [n]."""
        self._calls_us.add(steps, duration_us)
        self._newest_step = max(self._newest_step, int(steps.max()))
        self._learn()

    def finished(self, step: int, exposed_us: float) -> None:
        """Take in how long computation waited for communication in a finished step."""
        self._exposed_us.add(np.array([step]), np.array([exposed_us]))
        self._learn()

    def _learn(self) -> None:
        for step in sorted(self._exposed_us.keys() & self._calls_us.keys()):
            if step < self._newest_step:
                exposed_us, calls_us = self._exposed_us.pop(step), self._calls_us.pop(step)
                now = np.array([min(max(exposed_us, 0.0), calls_us), calls_us])
                before = np.full(2, calls_us) if self._sums_us is None else self._sums_us
                self._sums_us = before + LEARNED * (now - before)


def _in_0_to_1(share: float) -> float:
    return min(max(share, 0.0), 1.0)


class TrialCost:
    """How often keys are called, how much of that is waited for, and for how long a trial runs at least."""

    def __init__(self) -> None:
        self.exposed = ExposedShare()
        self.latency = RollbackLatency()
        self.connection_us = 0.0
        """What training waits for an algorithm to be connected, as far as this job has seen that."""
        self.traffic = Traffic()

    @property
    def charged_share(self) -> float:
        """Share of a collective's extra time that the budget pays for: what may be waited for, and a little more."""
        return min(1.0, self.exposed.bounds[1] + 0.1)

    def look_steps(self, keys: Sequence[int]) -> int:
        """How long a first look at these keys lasts: what is called, or measured, in few steps is looked at in more."""
        least_calls = min(1.0, float(self.traffic.per_step[[*keys]].min()))
        return round(FIRST_LOOK_STEPS / max(least_calls, FIRST_LOOK_STEPS / self.latency.trial_steps))

    def first_calls(self, key: int) -> float:
        """Calls of a key under a setting before anything is known of it."""
        latency = self.latency
        return self.traffic.calls_in(key, self.look_steps([key]) if latency.needs_looks else latency.steps)


FORGOTTEN: Final = 0.5
"""A delay shorter than the last ones counts this much at each look: a longer one counts at once."""
FIRST_LOOK_STEPS: Final = 2
"""Steps that a setting runs which was never measured; then it gives way by itself until its measurements are here."""
LEAST_TRIAL_STEPS: Final = 32
TRIAL_RESPONSES: Final = 4.0
"""How many times over evidence and a next plan could be on their way before a plan on trial gives way by itself."""
UNSEEN_RESPONSE: Final = 2.0
"""How many reports' steps a plan is believed to be on its way before any plan was seen adopted."""


class RollbackLatency:
    """Learns from what is seen how long evidence and plans are on their way, in steps.

    CallEvidence comes in reports of a second or less; with short steps that is hundreds of them. A setting that
    turns out to be slow has run for a whole report before that is known, and goes on until all ranks have
    adopted the next plan.
    """

    def __init__(self) -> None:
        self._known_step: int | None = None
        self._n_fresh = 0
        self._report_steps = 0.0
        """Steps that became known between two looks."""
        self._response_steps: float | None = None
        """From the last known step when a plan is offered to the step at which it is in force."""
        self._offered: dict[int, int] = {}
        self.stages_end = True
        """What gives way by itself, such as first looks, has always done so."""

    @property
    def needs_looks(self) -> bool:
        """A first look ends by itself before a setting could be withdrawn, as far as that is known or assumed."""
        return self.stages_end and (self._response_steps is None or self.steps > FIRST_LOOK_STEPS)

    @property
    def trial_steps(self) -> int:
        """How many steps a plan with something on trial lasts if nobody renews it: no trial runs unwatched for long."""
        return max(LEAST_TRIAL_STEPS, math.ceil(TRIAL_RESPONSES * self.steps))

    @property
    def steps(self) -> float:
        """How many steps of a setting are run between its adoption and the end of it, at the earliest.

        The first of them is in the report, and the response is counted from the report's last step.
        """
        response = self._response_steps
        if response is None:
            response = UNSEEN_RESPONSE * self._report_steps
        return max(1.0, self._report_steps + response - 1.0)

    def observed(self, first_step: int, last_step: int) -> None:
        """Measurements of these steps came in."""
        known = first_step - 1 if self._known_step is None else self._known_step
        if last_step > known:
            self._n_fresh += last_step - known
            self._known_step = last_step

    def looked(self) -> None:
        """A plan could be made now of all that is known."""
        if self._n_fresh:
            self._report_steps = _remembered(self._report_steps, self._n_fresh)
            self._n_fresh = 0

    def looks_on(self) -> None:
        """A first look did not end by itself: none is relied on any more."""
        self.stages_end = False

    def offered(self, epoch: int) -> None:
        """A plan is on its way to the ranks."""
        if self._known_step is not None:
            self._offered[epoch] = self._known_step

    def adopted(self, epoch: int, step: int) -> None:
        """All ranks run under `epoch` from `step` on."""
        known = self._offered.get(epoch)
        if known is not None:
            self._response_steps = _remembered(self._response_steps or 0.0, max(0, step - known))
        self._offered = {later: at for later, at in self._offered.items() if later > epoch}


def _remembered(before: float, now: float) -> float:
    return max(float(now), before + FORGOTTEN * (now - before))
