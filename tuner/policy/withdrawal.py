"""How many steps a setting runs until it can be withdrawn: what a trial may cost is that many steps of it."""

from __future__ import annotations

from typing import Final

FORGOTTEN: Final = 0.5
"""A delay shorter than the last ones counts this much at each look: a longer one counts at once."""
UNSEEN_RESPONSE: Final = 2.0
"""How many reports' steps a plan is believed to be on its way before any plan was seen adopted."""


class Withdrawal:
    """Learns from what is seen how long evidence and plans are on their way, in steps.

    Evidence comes in reports of a second or less; with short steps that is hundreds of them. A setting that
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

    @property
    def steps(self) -> float:
        """How many steps of a setting are run between its adoption and the end of it, at the earliest."""
        response = self._response_steps
        if response is None:
            response = UNSEEN_RESPONSE * self._report_steps
        return max(self._least_steps, self._report_steps + response)

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
