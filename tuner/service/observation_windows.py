"""Decides when ranks time their collectives: in all steps while something is learned, else in a sample of steps."""

from __future__ import annotations

from typing import Final

WINDOW_STEPS: Final = 20
BUSY_STEPS: Final = 200
"""Steps after the last new plan in which every step is observed."""
QUIET_PERIOD_STEPS: Final = 200
"""Later there is one window in this many steps, to notice changes."""


class ObservationWindows:
    """One job's schedule, driven by the leading rank's steps."""

    def __init__(self) -> None:
        self._ends_at_step = 0
        self._next_at_step = 0
        self._busy_until_step = BUSY_STEPS

    def plan_offered(self, step: int) -> None:
        """A new plan was offered: observe every step again."""
        self._busy_until_step = max(self._busy_until_step, step + BUSY_STEPS)
        self._next_at_step = min(self._next_at_step, self._ends_at_step)

    def remaining(self, step: int) -> int:
        """Remaining steps of the open window; 0: none is open."""
        return max(0, self._ends_at_step - step)

    def relayed(self, step: int, n_steps: int) -> None:
        """The leading daemon, on another node, has opened a window of `n_steps` here, too."""
        self._ends_at_step = step + n_steps

    def due(self, step: int) -> int:
        """Steps that the ranks should observe from now on; 0: send them nothing.

        A window is renewed half-way, so that windows of a busy time have no gaps.
        """
        busy = step < self._busy_until_step
        if step < self._next_at_step and not (busy and self.remaining(step) <= WINDOW_STEPS // 2):
            return 0
        self._ends_at_step = step + WINDOW_STEPS
        self._next_at_step = step + (WINDOW_STEPS if busy else QUIET_PERIOD_STEPS)
        return WINDOW_STEPS
