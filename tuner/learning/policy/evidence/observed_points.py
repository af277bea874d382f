"""Where settings were measured, by communicator: a *place* per (key, setting), for the whole job.

A place knows what the regime in force measured there (its slot of the evidence) and what older regimes did. Their
network was another, so that is kept without its key's *level*: how much longer (log) the same settings take at the key
than before the network changed for the first time.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from zerotune.store.records import SIZE_CLASSES_PER_OCTAVE, Candidate
from zerotune.tuner.learning.policy.evidence.call_evidence import CallEvidence
from zerotune.tuner.learning.policy.evidence.field import FieldBook
from zerotune.tuner.learning.policy.evidence.options_field import N_COLUMNS, Field
from zerotune.tuner.learning.policy.evidence.posterior import MAX_POINTS, Known, SettingPoints
from zerotune.tuner.learning.policy.trials.trial import KeyState
from zerotune.tuner.modeling.features import Floats, Ints

MAX_NEW_FIELDS: Final = 24
"""Neighbours' fields that one call may work out; the others are left out until a later call."""
OTHER_COLLECTIVE: Final = 2.0 * SIZE_CLASSES_PER_OCTAVE
"""So many size classes away counts what another collective measured."""
CARRIED_STD: Final = 0.25
CARRIED_SHARE: Final = 0.4
"""How far (log) a setting may be from what an older regime measured, but for its key's level: by CARRIED_STD at least,
and by CARRIED_SHARE of what has changed at the key. A change of the network is not the same for all settings.
"""
_NO_SLOT: Final = -1


class ObservedPoints:
    """Those of one communicator, with the rows (as `Field.table`) that say where they lie, made when asked for."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, Candidate], int] = {}
        self._first_of: dict[int, int] = {}
        """The first place of each key."""
        self._candidates: list[Candidate] = []
        self._made_from: list[Field | None] = []
        self._owner = np.zeros(0, np.int64)
        self._slot = np.zeros(0, np.int64)
        self._class = np.zeros(0)
        self._collective = np.zeros(0, np.int64)
        self._row = np.zeros((0, N_COLUMNS))
        self._past_log_us = np.zeros(0)
        """What older regimes measured, less its key's level then; NaN where none did."""
        self._past_variance = np.zeros(0)
        self._past_level = np.zeros(0)
        self._level = np.zeros(0)
        """Of each place's key."""
        self._has_past = False
        self._curve: tuple[Floats, Floats] | None = None
        """Size classes of the keys whose level is known, in order, and these levels."""

    def __len__(self) -> int:
        return len(self._candidates)

    def append(self, slot: int, state: KeyState, candidate: Candidate) -> None:
        """The regime in force has a slot for a key's setting.

        Args:
            slot: of the evidence.
            state: the key.
            candidate: the setting.
        """
        at = self._at.get((state.index, candidate))
        if at is None:
            at = self._at[state.index, candidate] = len(self)
            if at >= len(self._class):
                self._grow(max(64, at))
            self._class[at], self._collective[at] = state.key.size_class, int(state.key.collective)
            self._owner[at] = state.index
            self._level[at] = self.level(state)
            self._first_of.setdefault(state.index, at)
            self._candidates.append(candidate)
            self._made_from.append(None)
        self._slot[at] = slot

    def _grow(self, more: int) -> None:
        for name, filler in (
            ("_owner", 0),
            ("_slot", _NO_SLOT),
            ("_class", 0.0),
            ("_collective", 0),
            ("_row", np.nan),
            ("_past_log_us", np.nan),
            ("_past_variance", 0.0),
            ("_past_level", 0.0),
            ("_level", 0.0),
        ):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.full((more, *old.shape[1:]), filler, old.dtype)]))

    # ---- regimes ------------------------------------------------------------------------------------

    def leave(self, evidence: CallEvidence) -> None:
        """The regime with this evidence is left: what it measured is what an older regime did."""
        self.follow_levels(evidence)
        here = np.arange(len(self))
        at = here[self._is_measured(here, evidence)]
        slots = self._slot[at]
        self._past_log_us[at] = evidence.centre(slots) - self._level[at]
        self._past_variance[at] = _noise(slots, evidence)
        self._past_level[at] = self._level[at]
        self._slot[:] = _NO_SLOT
        self._has_past |= bool(len(at))

    def follow_levels(self, evidence: CallEvidence) -> None:
        """What settings take now that older regimes measured as well says where each key's level is."""
        if not self._has_past:
            return
        here = np.flatnonzero(np.isfinite(self._past_log_us[: len(self)]))
        at = here[self._is_measured(here, evidence)]
        if not len(at):
            return
        owner, slots = self._owner[at], self._slot[at]
        precision = 1.0 / (_noise(slots, evidence) + self._past_variance[at] + CARRIED_STD**2)
        weight = np.bincount(owner, precision)
        total = np.bincount(owner, precision * (evidence.centre(slots) - self._past_log_us[at]))
        owners, first = np.unique(owner, return_index=True)
        classes, levels = self._class[at[first]], total[owners] / weight[owners]
        order = np.argsort(classes, kind="stable")
        self._curve = classes[order], levels[order]
        self._level[: len(self)] = np.interp(self._class[: len(self)], *self._curve)
        of_owner = np.full(int(self._owner[: len(self)].max()) + 1, np.nan)
        of_owner[owners] = levels
        own = of_owner[self._owner[: len(self)]]
        is_told = np.flatnonzero(np.isfinite(own))
        self._level[is_told] = own[is_told]

    def level(self, state: KeyState) -> float:
        """The level of a key; of one where nothing tells, that of others with about its message size."""
        first = self._first_of.get(state.index)
        if first is not None:
            return float(self._level[first])
        return 0.0 if self._curve is None else float(np.interp(state.key.size_class, *self._curve))

    def _is_measured(self, at: Ints, evidence: CallEvidence) -> npt.NDArray[np.bool_]:
        """Which of the places the regime in force has measured."""
        slots = self._slot[at]
        measured: npt.NDArray[np.bool_] = slots != _NO_SLOT
        measured[measured] = evidence.n_calls[slots[measured]] > 0
        return measured

    # ---- what is known ------------------------------------------------------------------------------

    def near(self, state: KeyState, states: list[KeyState], fields: FieldBook, evidence: CallEvidence) -> Known:
        """What was measured at the nearest size classes; other collectives count as far off.

        Args:
            state: the key.
            states: of all keys, by key index.
            fields: makes the rows of points that have none yet.
            evidence: of the regime in force.

        Returns:
            At most MAX_POINTS points.
        """
        n = len(self)
        gaps = np.abs(self._class[:n] - state.key.size_class)
        gaps += OTHER_COLLECTIVE * (self._collective[:n] != int(state.key.collective))
        chosen = np.argpartition(gaps, MAX_POINTS)[:MAX_POINTS] if n > MAX_POINTS else np.arange(n)
        at = self._with_rows(chosen, states, fields)
        carried = np.maximum(CARRIED_STD, CARRIED_SHARE * np.abs(self._level[at] - self._past_level[at]))
        log_us, variance = self._past_log_us[at], self._past_variance[at] + carried**2
        is_now = self._is_measured(at, evidence)
        slots = self._slot[at[is_now]]
        log_us[is_now] = evidence.centre(slots) - self._level[at[is_now]]
        variance[is_now] = _noise(slots, evidence)
        rows = self._row[at]
        known = np.isfinite(log_us) & np.isfinite(rows[:, 4])
        if not known.all():
            at, rows, log_us, variance = at[known], rows[known], log_us[known], variance[known]
        lie = SettingPoints.of_table(rows, self._collective[at], self._owner[at])
        return Known(lie, rows[:, 5], log_us - rows[:, 4], variance)

    def _with_rows(self, chosen: Ints, states: list[KeyState], fields: FieldBook) -> Ints:
        """Those of the places whose rows are up to date by now."""
        n_new, kept = 0, []
        for at in chosen.tolist():
            owner = states[self._owner[at]]
            field = owner.field
            if field is None:
                if n_new >= MAX_NEW_FIELDS:
                    continue
                n_new += 1
                field = fields.of(owner)
            if self._made_from[at] is not field:
                place = field.place.get(self._candidates[at])
                self._row[at] = np.nan if place is None else field.table[place]
                self._made_from[at] = field
            kept.append(at)
        return np.array(kept, dtype=np.int64)


def _noise(slots: Ints, evidence: CallEvidence) -> Floats:
    """Variance of the means of these slots."""
    noise: Floats = evidence.sigma(evidence.key[slots]) ** 2 / (evidence.n_units[slots] + 1.0)
    return noise
