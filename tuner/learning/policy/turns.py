"""Whose turn it is at each key in the next window: the incumbent's, its trial's or its lead's.

Trials and leads get shares of the windows, and the windows that are due sum these up: over a few windows everything
has run as often as it should, whatever the shares are.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

LEAST_SHARE: Final = 0.15
MOST_SHARE: Final = 0.95
"""Bounds of the share of windows that a trial gets; between them it is the odds that the trial is faster."""
LEAD_SHARE: Final = 0.92
"""Share of the windows without a trial that a lead gets."""
TRUSTED_SHARE: Final = 0.75
"""The least that a trial gets which earlier jobs proved."""

Flags = npt.NDArray[np.bool_]


class Turns:
    """Shares and turns of all keys, by index."""

    def __init__(self) -> None:
        self._runs_trial = np.zeros(0, np.bool_)
        self._runs_lead = np.zeros(0, np.bool_)
        self._has_lead = np.zeros(0, np.bool_)
        self._lead_due = np.zeros(0)
        """Windows of the lead that are due, among those without a trial."""
        self._share = np.zeros(0)
        """Share of a key's windows that its trial gets; 0 = no trial."""
        self._due = np.zeros(0)
        """Windows of the trial that are due: sums up the share, a window takes one."""
        self._is_trusted = np.zeros(0, np.bool_)
        self._changed: set[int] = set()

    def register(self, index: int) -> None:
        """There is such a key."""
        if index >= len(self._share):
            self._grow(max(64, index + 1))

    def is_trials(self, index: int) -> bool:
        """This window is the trial's."""
        return bool(self._runs_trial[index])

    def is_leads(self, index: int) -> bool:
        """This window is the lead's."""
        return bool(self._runs_lead[index])

    def explored(self) -> Flags:
        """Where something runs in this window that nothing has spoken for yet."""
        explored: Flags = self._runs_trial & ~self._is_trusted | self._runs_lead
        return explored

    def verified(self) -> Flags:
        """Where something that earlier jobs proved takes turns with the incumbent."""
        verified: Flags = self._is_trusted & (self._share > 0.0)
        return verified

    def begin_trial(self, index: int, odds: float, *, is_trusted: bool) -> None:
        """A trial begins.

        Args:
            index: of the key.
            odds: probability that it is faster.
            is_trusted: earlier jobs proved it.
        """
        self._is_trusted[index] = is_trusted
        self.weigh_trial(index, odds)
        # It runs at once; trusted ones take turns at showing the incumbent again.
        self._due[index] = 1.0 - self._share[index] * (index % 3 == 0 if is_trusted else 1)

    def weigh_trial(self, index: int, odds: float) -> None:
        """What is known now of the trial."""
        self._share[index] = min(max(odds, TRUSTED_SHARE if self._is_trusted[index] else LEAST_SHARE), MOST_SHARE)

    def end_trial(self, index: int) -> None:
        """No trial any more."""
        self._share[index] = self._due[index] = 0.0
        self._changed.add(index)

    def end_turn(self, index: int) -> None:
        """The trial's turn is over before the window is: what usually runs goes on."""
        self._runs_trial[index] = False
        self._runs_lead[index] = self._has_lead[index]

    def begin_lead(self, index: int) -> None:
        """A lead from now on."""
        self._has_lead[index] = True
        self._changed.add(index)

    def end_lead(self, index: int) -> None:
        """No lead any more."""
        self._has_lead[index] = False
        self._changed.add(index)

    def take(
        self, *, is_overdrawn: bool, leads_rest_at: Collection[int] | None = None
    ) -> set[int]:
        """Choose what runs in the next window.

        Args:
            is_overdrawn: the budget is: only incumbents and what earlier jobs proved run.
            leads_rest_at: None while leads alternate with incumbents. While steps are compared, at these keys no lead
                runs; others run in all windows, as what alternates would scatter the steps.

        Returns:
            Keys at which something else may run than in the last window.
        """
        self._due += self._share
        runs_trial = self._due >= 1.0
        self._due[runs_trial] -= 1.0
        waits = self._has_lead & ~runs_trial
        self._lead_due[waits] += LEAD_SHARE
        runs_lead = waits & (self._lead_due >= 1.0)
        self._lead_due[runs_lead] -= 1.0
        if leads_rest_at is not None:
            runs_lead = waits
            runs_lead[[*leads_rest_at]] = False
        if is_overdrawn:
            runs_trial &= self._is_trusted
            runs_lead &= self._is_trusted
        differs = (runs_trial != self._runs_trial) | (runs_lead != self._runs_lead)
        changed = self._changed | set(np.flatnonzero(differs).tolist())
        self._runs_trial, self._runs_lead = runs_trial, runs_lead
        self._changed = set()
        return changed

    def _grow(self, more: int) -> None:
        for name in ("_runs_trial", "_runs_lead", "_has_lead", "_lead_due", "_share", "_due", "_is_trusted"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(more, old.dtype)]))
