"""Which plan is in force, which is on its way, and when the next one is due."""

from __future__ import annotations

from typing import Final

from zerotune.tuner.learning.policy.plans import PlanBook, PlanInForce
from zerotune.tuner.learning.policy.trials.withdrawal import Withdrawal

OFFER_PATIENCE_STEPS: Final = 50
LOOK_PATIENCE: Final = 4
"""A first look that goes on for this many times its steps does not end by itself."""


class Epochs:
    """Follows plans from being offered to being in force; steps are training steps.

    Args:
        plans: what was asked for under each epoch.
        withdrawal: learns how long plans are on their way.
        window_steps: how long a plan runs before the next one may replace it.
    """

    def __init__(self, plans: PlanBook, withdrawal: Withdrawal, window_steps: int) -> None:
        self._plans = plans
        self._withdrawal = withdrawal
        self._window_steps = window_steps
        self.active = 0
        """The epoch in force."""
        self.next = 1
        """The epoch of the next plan."""
        self.must_repeat = False
        """What was last asked for is not in force: it expired, was refused or got lost."""
        self.takes_over = False
        """The plan in force is of a daemon that is gone, and that has not been told yet."""
        self._offered: int | None = None
        """The last epoch of the plan on its way."""
        self._offered_at_step = 0
        self._steps_in_epoch = 0
        self._planned_at_step = -1

    @property
    def latest(self) -> PlanInForce | None:
        """The plan on its way, or else the one in force; None when that is another daemon's."""
        return self._plans.get(self.active if self._offered is None else self._offered)

    def step_ran(self, epoch: int) -> None:
        """A step has finished under `epoch`."""
        if epoch == self.active:
            self._steps_in_epoch += 1

    def adopted(self, epoch: int, step: int) -> None:
        """All ranks run under `epoch` from `step` on."""
        if epoch == 0 < self.active:
            # They heard nothing of this daemon for so long that their plan expired.
            self.active, self._steps_in_epoch, self._offered = 0, 0, None
            self.must_repeat = True
            return
        if epoch < self.active:
            return
        self.active = epoch
        self._withdrawal.adopted(epoch, step, looks=self._is_looking)
        self._steps_in_epoch = 0
        if self._offered is not None and epoch >= self._offered:
            self._offered = None
        self.takes_over |= epoch >= self.next
        self.next = max(self.next, epoch + 1)

    def is_due(self, step: int) -> bool:
        """Whether the next plan may replace the one in force."""
        if self._offered is not None and not self._is_overdue(step):
            return False
        return self._steps_in_epoch >= self._window_steps and step != self._planned_at_step

    def plan_at(self, step: int) -> None:
        """A plan is thought of; what should have been adopted long ago is waited for no longer."""
        self._planned_at_step = step
        if self._offered is not None and self._is_overdue(step):
            self._offered, self.must_repeat = None, True
            if self._is_looking:
                self._withdrawal.looks_on()

    def offer(self, entry: PlanInForce, step: int) -> None:
        """`entry` is on its way to the ranks."""
        self._plans.add(entry, self.active)
        self._offered, self._offered_at_step = entry.plan.last_epoch, step
        self.next = entry.plan.last_epoch + 1
        self._withdrawal.offered(entry.plan.epoch)

    def _is_overdue(self, step: int) -> bool:
        if self._is_looking:
            return self._steps_in_epoch > LOOK_PATIENCE * self._withdrawal.first_steps
        patience_steps = max(OFFER_PATIENCE_STEPS, 2.0 * self._withdrawal.steps)
        return step - self._offered_at_step >= patience_steps

    @property
    def _is_looking(self) -> bool:
        """A first look is in force."""
        in_force = self._plans.get(self.active)
        return in_force is not None and in_force.plan.first_look is not None
