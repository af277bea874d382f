"""The budget of exploration, its reservations, and how much training waits for calls.

All costs are microseconds of training time. A trial at a key that is called once in a hundred steps waits that long for
its first call. Hundreds of such keys may be called in one step, so each trial's risk stays reserved until its cost is
measured.
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
"""A setting that takes this many times as long as the incumbent is a catastrophe and not tried again."""
LOG_CATASTROPHE: Final = math.log(CATASTROPHIC_RATIO)


WINDOW_STEPS: Final = 200
"""Exploration stays within the budget of all steps so far, and within that of any this many steps in a row."""


class Budget:
    """The ledger of exploration: finished steps earn a fraction of their time, trials reserve, charges are spent."""

    def __init__(self, fraction: float) -> None:
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"budget fraction {fraction} is outside 0..1")
        self.fraction = fraction
        self.training_us = 0.0
        self.spent_us = 0.0
        self.n_steps = 0
        self._window: deque[tuple[float, float]] = deque([(0.0, 0.0)], WINDOW_STEPS)
        """Training time and spent time at the beginning of each of the latest steps, oldest first."""
        self._reserved_us: dict[int, tuple[float, float]] = {}
        """By key, the most that its trial may cost until it is measured, and the cost of its connection."""

    def earn(self, step_us: float) -> None:
        """A training step of `step_us` microseconds has finished."""
        self.training_us += step_us
        self.n_steps += 1
        self._window.append((self.training_us, self.spent_us))

    def spend(self, extra_us: float) -> None:
        """Exploration cost `extra_us` more than the incumbents; a negative one corrects an earlier charge."""
        self.spent_us = max(0.0, self.spent_us + extra_us)

    def reserve(self, key: int, risk_us: float, once_us: float) -> None:
        """A trial begins: reserve its possible cost until it is measured, and the cost of its connection."""
        self._reserved_us[key] = risk_us, once_us

    def release(self, key: int) -> None:
        """The trial of a key has ended, or was measured: from now on its calls are charged."""
        self._reserved_us.pop(key, None)

    @property
    def reserved(self) -> list[int]:
        """Keys whose trial waits for its first measurement."""
        return [*self._reserved_us]

    @property
    def free_us(self) -> tuple[float, float]:
        """Cost that trials may still risk: now, and of all steps' budget, which also pays for connections."""
        risk_us = sum(risk for risk, _ in self._reserved_us.values())
        once_us = sum(once for _, once in self._reserved_us.values())
        return self.remaining_us - risk_us, self.in_all_us - risk_us - once_us

    def affords(self, risk_us: float, once_us: float) -> bool:
        """Whether the budget covers a trial with this risk and connection cost."""
        now_us, in_all_us = self.free_us
        return risk_us <= now_us and risk_us + once_us <= in_all_us

    @property
    def in_all_us(self) -> float:
        """Rest of all steps' budget; a connection may cost more than a window's budget."""
        return self.fraction * self.training_us - self.spent_us

    @property
    def remaining_us(self) -> float:
        """Cost that may still be spent; negative if a trial cost more than its reserved risk."""
        trained_us, spent_us = self._window[0]
        of_window_us = self.fraction * (self.training_us - trained_us) - (self.spent_us - spent_us)
        return min(self.in_all_us, of_window_us)


LEARNED: Final = 0.1
"""Weight of the newest step in the running sums."""
ANY_SHARE: Final = (0.5, 0.5)
"""Mean and standard deviation of an unknown share."""


class ExposedShare:
    """The share of calls' time that computation waits for: measured, or estimated from step times, or unknown.

    The measured share is steps' exposed time over their calls' time, so a step of large messages has more weight.
    Calls and a step's record may come in either order. If calls of a step are lost, the share looks too large:
    exploration is then charged too much, never too little.
    """

    def __init__(self) -> None:
        self._calls_us, self._exposed_us = StepSums(), StepSums()
        """By step, until the other one has come; if calls or records are lost, it never comes."""
        self._newest_step = -1
        self._sums_us: Floats | None = None
        """Running sums of exposed time and of calls' time."""
        self.estimate = ANY_SHARE
        """The share of calls' extra time that steps get longer: mean (maybe outside 0 to 1) and standard deviation."""

    @property
    def is_measured(self) -> bool:
        """Whether at least one step measured the share."""
        return self._sums_us is not None

    @property
    def share(self) -> float:
        """The measured share, or else the estimate's mean, within 0 to 1."""
        measured = self._sums_us
        return _in_0_to_1(self.estimate[0] if measured is None else float(measured[0] / measured[1]))

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of the share's 90 % interval; 0 and 1 if nothing is known."""
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
    """How often keys are called, how much of their time training waits for, and the least steps of a trial."""

    def __init__(self) -> None:
        self.exposed = ExposedShare()
        self.latency = RollbackLatency()
        self.connection_us = 0.0
        """How long training waits for an algorithm's connection, as this job measured it."""
        self.traffic = Traffic()

    @property
    def charged_share(self) -> float:
        """Share of a call's extra time that the budget pays for: the upper bound of the exposed share, and a margin."""
        return min(1.0, self.exposed.bounds[1] + 0.1)

    def look_steps(self, keys: Sequence[int]) -> int:
        """Steps of a first look at these keys: more if they are called, or measured, in few steps only."""
        least_calls = min(1.0, float(self.traffic.per_step[[*keys]].min()))
        return round(FIRST_LOOK_STEPS / max(least_calls, FIRST_LOOK_STEPS / self.latency.trial_steps))

    def first_calls(self, key: int) -> float:
        """Calls of a key under a new setting before the setting can be withdrawn."""
        latency = self.latency
        return self.traffic.calls_in(key, self.look_steps([key]) if latency.needs_looks else latency.steps)


FORGOTTEN: Final = 0.5
"""Weight of a delay shorter than the last ones; a longer one counts at once."""
FIRST_LOOK_STEPS: Final = 2
"""Steps of a setting that was never measured; then the plan ends it until its measurements have come."""
LEAST_TRIAL_STEPS: Final = 32
TRIAL_RESPONSES: Final = 4.0
"""A plan with trials ends by itself after this many times the usual delay of evidence and the next plan."""
UNSEEN_RESPONSE: Final = 2.0
"""Assumed delay of a plan, in reports, before any adoption was seen."""


class RollbackLatency:
    """Learns how long evidence and plans are on their way, in steps.

    Measurements come in reports of a second or less, which may be hundreds of short steps. A slow setting has run for
    a whole report before that is known, and it runs on until all ranks have adopted the next plan.
    """

    def __init__(self) -> None:
        self._known_step: int | None = None
        self._n_fresh = 0
        self._report_steps = 0.0
        """Steps that became known between two looks."""
        self._response_steps: float | None = None
        """Steps from the last known one, when a plan is offered, to the one at which it is in force."""
        self._offered: dict[int, int] = {}
        self.stages_end = True
        """Stages such as first looks have always ended by themselves."""

    @property
    def needs_looks(self) -> bool:
        """Whether a first look ends earlier than the daemon could withdraw a setting, by what is known or assumed."""
        return self.stages_end and (self._response_steps is None or self.steps > FIRST_LOOK_STEPS)

    @property
    def trial_steps(self) -> int:
        """Steps after which a plan with trials ends by itself, so that no trial runs long without the daemon."""
        return max(LEAST_TRIAL_STEPS, math.ceil(TRIAL_RESPONSES * self.steps))

    @property
    def steps(self) -> float:
        """Least steps of a setting between its adoption and its withdrawal.

        Its first step is in the report; the response is counted from the report's last step.
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
        """The daemon looks at all that is known and could make a plan now."""
        if self._n_fresh:
            self._report_steps = _remembered(self._report_steps, self._n_fresh)
            self._n_fresh = 0

    def looks_on(self) -> None:
        """A first look did not end by itself: rely on none any more."""
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
