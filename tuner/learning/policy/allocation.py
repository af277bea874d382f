"""What each key runs in the next window: the incumbent, its trial or its lead."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

INCUMBENT_EVERY: Final = 12
"""A lead leaves one in so many of the windows without a trial to the incumbent."""
VERIFIED_IN: Final = 8
"""First windows in which a lead that earlier jobs proved takes turns with the incumbent, not measured so far."""

Flags = npt.NDArray[np.bool_]


class Allocation:
    """What all keys run, by index: a trial in every other window, and at once; a lead in nearly all others."""

    def __init__(self) -> None:
        self._runs_trial = np.zeros(0, np.bool_)
        self._runs_lead = np.zeros(0, np.bool_)
        self._has_trial = np.zeros(0, np.bool_)
        self._has_lead = np.zeros(0, np.bool_)
        self._is_proven = np.zeros(0, np.bool_)
        """The lead is."""
        self._was_trials = np.zeros(0, np.bool_)
        """The last window was the trial's, were it only for its first steps."""
        self._n_waited = np.zeros(0, np.int64)
        """Windows without a trial since the lead began; below 0 while it takes turns with the incumbent."""
        self._changed: set[int] = set()

    def register(self, index: int) -> None:
        """There is such a key."""
        if index >= len(self._has_trial):
            self._grow(max(64, index + 1))

    def is_trials(self, index: int) -> bool:
        """This window is the trial's."""
        return bool(self._runs_trial[index])

    def is_leads(self, index: int) -> bool:
        """This window is the lead's."""
        return bool(self._runs_lead[index])

    def explored(self) -> Flags:
        """Where something runs in this window that nothing has spoken for yet."""
        explored: Flags = self._runs_trial | self._runs_lead & ~self._is_proven
        return explored

    def verified(self) -> Flags:
        """Where something that earlier jobs proved takes turns with the incumbent."""
        verified: Flags = self._has_lead & self._is_proven
        return verified

    def begin_trial(self, index: int) -> None:
        """A trial from now on."""
        self._has_trial[index], self._was_trials[index] = True, False

    def end_trial(self, index: int) -> None:
        """No trial any more."""
        self._has_trial[index] = False
        self._changed.add(index)

    def end_window(self, index: int) -> None:
        """The trial gives way before the window is over: what usually runs goes on."""
        self._runs_trial[index] = False
        self._runs_lead[index] = self._has_lead[index]

    def begin_lead(self, index: int, *, is_proven: bool) -> None:
        """A lead from now on.

        Args:
            index: of the key.
            is_proven: earlier jobs proved it.
        """
        self._has_lead[index], self._is_proven[index] = True, is_proven
        self._n_waited[index] = -VERIFIED_IN if is_proven else 0
        self._changed.add(index)

    def end_lead(self, index: int) -> None:
        """No lead any more."""
        self._has_lead[index] = False
        self._changed.add(index)

    def take(self, *, is_overspent: bool, leads_rest_at: Collection[int] | None = None) -> set[int]:
        """Choose what runs in the next window.

        Args:
            is_overspent: the budget is: only incumbents and what earlier jobs proved run.
            leads_rest_at: None while leads alternate with incumbents. While steps are compared, at these keys no lead
                runs; others run in all windows, as what alternates would scatter the steps.

        Returns:
            Keys at which something else may run than in the last window.
        """
        runs_trial = self._has_trial & ~self._was_trials
        self._was_trials = runs_trial.copy()
        runs_lead = self._has_lead & ~runs_trial
        if leads_rest_at is None:
            self._n_waited += runs_lead
            # Not all keys' leads rest in the same window.
            rests = (self._n_waited + np.arange(len(runs_lead))) % INCUMBENT_EVERY == 0
            runs_lead &= ~np.where(self._n_waited < 0, self._n_waited % 2 == 0, rests)
        else:
            runs_lead[[*leads_rest_at]] = False
        if is_overspent:
            runs_trial = np.zeros_like(runs_trial)
            runs_lead &= self._is_proven
        differs = (runs_trial != self._runs_trial) | (runs_lead != self._runs_lead)
        changed = self._changed | set(np.flatnonzero(differs).tolist())
        self._runs_trial, self._runs_lead = runs_trial, runs_lead
        self._changed = set()
        return changed

    def _grow(self, more: int) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(self, name, np.concatenate([value, np.zeros(more, value.dtype)]))
