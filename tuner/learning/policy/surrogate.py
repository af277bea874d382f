"""Predicts every option of a key by `posterior.py` from this job's measurements near the key."""

from __future__ import annotations

from typing import Final

import numpy as np

from ....store.records import SIZE_CLASSES_PER_OCTAVE, Candidate
from ...modeling.features import Floats, Ints
from ...modeling.posterior import Column, Known, condition
from .change_detection import Regimes
from .keys import CandidateTables, KeyState
from .observations import AT_ONCE, CallEvidence

CARRIED_STD: Final = 0.25
"""Extra doubt (log) of measurements from another regime: it does not slow all settings equally."""


class Surrogate:
    """Posterior predictions for the keys of one job from the measurements of its regimes."""

    def __init__(self, tables: CandidateTables, regimes: Regimes) -> None:
        self.tables = tables
        self.regimes = regimes

    @property
    def evidence(self) -> CallEvidence:
        """The evidence of the regime in force."""
        return self.regimes.evidence

    def posterior(self, state: KeyState) -> tuple[Floats, Floats]:
        """Predicted durations of every option of a key; kept as `state.last_posterior`.

        Returns means (log us; infinite: not available) and standard deviations (log), each [n_options], baseline first.
        """
        table, common_std = self.tables.of(state).table, self.tables.family(state.family).doubt_in_common
        usable, rows = np.isfinite(table[:, Column.guess]), np.where(np.isnan(table), 0.0, table)
        mean, spread = condition(rows, self._near(state), common_std, self.evidence.regime)
        state.last_posterior = np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)
        return state.last_posterior

    def _near(self, state: KeyState) -> Known:
        """Measurements at the nearest sizes: AT_ONCE slots of this regime, and the last ones of earlier regimes."""
        rows: list[Floats] = []
        found: list[tuple[Floats, Floats, Floats]] = []
        n_new, seen, states = 0, set[tuple[int, Candidate]](), self.tables.states
        for evidence in reversed(self.regimes.every):
            is_past, kept = evidence is not self.evidence, []
            slots = self._nearest(state, evidence) if len(rows) < 2 * AT_ONCE else np.zeros(0, np.int64)
            for slot, key in zip(slots.tolist(), evidence.key[slots].tolist(), strict=True):
                candidate, field = evidence.candidates[slot], states[key].field
                n_new += field is None
                if (is_past and (key, candidate) in seen) or (field is None and n_new > AT_ONCE // 6):
                    continue  # some keys without a table wait for a later call
                field = field or self.tables.of(states[key])
                if (place := field.place.get(candidate)) is not None:
                    rows.append(field.table[place])
                    kept.append(slot)
                if is_past:
                    seen.add((key, candidate))
            slots = np.array(kept, np.int64)
            variance = evidence.sigma(evidence.key[slots]) ** 2 / (evidence.n_units[slots] + 1.0)
            variance += CARRIED_STD**2 * is_past
            found.append((np.full(len(kept), evidence.regime), evidence.centre(slots), variance))
        table = np.concatenate([np.zeros(0), *rows]).reshape(-1, len(Column))
        regimes, log_us, variances = (np.concatenate(of_each) for of_each in zip(*found, strict=True))
        residual = log_us - table[:, Column.guess]
        known = np.isfinite(residual)
        return Known(table[known], regimes[known], residual[known], variances[known])

    def _nearest(self, state: KeyState, evidence: CallEvidence) -> Ints:
        """AT_ONCE measured slots of the key's communicator, in their order; other collectives are two octaves off."""
        keys, (communicators, collectives, classes) = evidence.key[: len(evidence)], self.tables.places.T
        communicator, collective, own_class = self.tables.places[state.index].tolist()
        slots = np.flatnonzero((communicators == communicator)[keys] & (evidence.n_calls[: len(evidence)] > 0))
        if len(slots) <= AT_ONCE:
            return slots
        gaps = np.abs(classes - own_class) + 2 * SIZE_CLASSES_PER_OCTAVE * (collectives != collective)
        return slots[np.sort(np.argpartition(gaps[keys[slots]], AT_ONCE)[:AT_ONCE])]
