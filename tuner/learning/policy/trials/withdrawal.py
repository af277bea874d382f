"""How many steps a setting runs until it can be withdrawn: what a trial may cost is that many steps of it."""

from __future__ import annotations

import math
from typing import Final

FORGOTTEN: Final = 0.5
"""A delay shorter than the last ones counts this much at each look: a longer one counts at once."""
FIRST_LOOK_STEPS: Final = 2
"""Steps that a setting runs which was never measured; then it gives way by itself until its measurements are here."""
UNSEEN_RESPONSE: Final = 2.0
"""How many reports' steps a plan is believed to be on its way before any plan was seen adopted."""


class Withdrawal:
    """Learns from what is seen how long evidence and plans are on their way, in steps.

    CallEvidence comes in reports of a second or less; with short steps that is hundreds of them. A setting that
    turns out to be slow has run for a whole report before that is known, and goes on until all ranks have
    adopted the next plan.

    Args:
        least_steps: never believe in fewer.
    """

    def __init__(self, least_steps: float) -> None:
        self._least_steps = least_steps
        self._known_step: int | None = None
        self._n_fresh = 0
        self._report_steps = 0.0
        """Steps that became known between two looks."""
        self._response_steps: float | None = None
        """From the last known step when a plan is offered to the step at which it is in force."""
        self._offered: dict[int, int] = {}
        self._look: tuple[int, int] | None = None
        """The epoch under which a first look will end, and the step at which it began."""
        self._look_steps = float(FIRST_LOOK_STEPS)

    def set_agreement_interval(self, n_boundaries: int) -> None:
        """A first look ends at a turn, the first after it is over."""
        self._look_steps = max(self._look_steps, float(n_boundaries))

    @property
    def needs_looks(self) -> bool:
        """A first look ends by itself before a setting could be withdrawn, as far as that is known or assumed."""
        return math.isfinite(self._look_steps) and (self._response_steps is None or self.steps > self._look_steps)

    @property
    def first_steps(self) -> float:
        """How many steps a setting runs before anything is known of it."""
        return self._look_steps if self.needs_looks else self.steps

    @property
    def steps(self) -> float:
        """How many steps of a setting are run between its adoption and the end of it, at the earliest.

        The first of them is in the report, and the response is counted from the report's last step.
        """
        response = self._response_steps
        if response is None:
            response = UNSEEN_RESPONSE * self._report_steps
        return max(self._least_steps, self._report_steps + response - 1.0)

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
        self._look, self._look_steps = None, math.inf

    def offered(self, epoch: int) -> None:
        """A plan is on its way to the ranks."""
        if self._known_step is not None:
            self._offered[epoch] = self._known_step

    def adopted(self, epoch: int, step: int, *, looks: bool = False) -> None:
        """All ranks run under `epoch` from `step` on.

        Args:
            epoch: of the plan.
            step: its first step.
            looks: a first look begins.
        """
        if self._look is not None and self._look[0] == epoch:
            self._look_steps = _remembered(self._look_steps, max(FIRST_LOOK_STEPS, step - self._look[1]))
        self._look = (epoch + 1, step) if looks else None
        known = self._offered.get(epoch)
        if known is not None:
            self._response_steps = _remembered(self._response_steps or 0.0, max(0, step - known))
        self._offered = {later: at for later, at in self._offered.items() if later > epoch}


def _remembered(before: float, now: float) -> float:
    return max(float(now), before + FORGOTTEN * (now - before))
