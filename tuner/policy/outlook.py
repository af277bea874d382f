"""What is to be expected of every option of a key: its starting guess, conditioned on what was measured near."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from store.records import Candidate
from tuner.features import CostPrior, Floats, Ints
from tuner.knowledge import Knowledge
from tuner.policy.evidence import Evidence
from tuner.policy.field import Field, FieldBook
from tuner.policy.posterior import MAX_POINTS, Settings, condition
from tuner.policy.trial import Family, KeyState

MAX_NEW_FIELDS: Final = 24
"""Neighbours' fields that one call may work out; the others are left out until a later call."""


class Outlook:
    """Posterior opinions about the keys of one job. Evidence is passed in: it changes with the regime."""

    def __init__(self, costs: CostPrior) -> None:
        self.fields = FieldBook(costs)
        self._measured: WeakKeyDictionary[Evidence, _Measured] = WeakKeyDictionary()

    def know(self, knowledge: Knowledge, states: list[KeyState]) -> None:
        """Use what earlier runs left from now on."""
        self.fields.knowledge = knowledge
        self.fields.forget(states)

    def posterior(self, state: KeyState, states: list[KeyState], evidence: Evidence) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the log duration of every option of `state`, the baseline first."""
        table = self.fields.of(state).table
        guess, std = table[:, 4], table[:, 5]
        usable = np.isfinite(guess)
        measured = self._measured.get(evidence)
        if measured is None:
            measured = self._measured[evidence] = _Measured()
        measured.follow(evidence, states)
        slots, near = measured.near(state, states, self.fields)
        known = (evidence.n_calls[slots] > 0) & np.isfinite(near[:, 4])
        if not known.all():
            slots, near = slots[known], near[known]
        keys = evidence.key[slots]
        mean, spread = condition(
            np.where(usable, guess, 0.0),
            std,
            Settings.of_table(table, np.full(len(table), state.index)),
            Settings.of_table(near, keys),
            near[:, 5],
            evidence.centre(slots) - near[:, 4],
            evidence.sigma(keys) ** 2 / (evidence.n_units[slots] + 1.0),
        )
        state.opinion = np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)
        return state.opinion


class _Measured:
    """The slots of one regime's evidence by family, with the rows (as `Field.table`) that say where they lie."""

    def __init__(self) -> None:
        self._n_followed = 0
        self._families: dict[Family, _FamilySlots] = {}

    def follow(self, evidence: Evidence, states: list[KeyState]) -> None:
        """Take in slots made since the last call."""
        for slot in range(self._n_followed, len(evidence)):
            state = states[int(evidence.key[slot])]
            family = self._families.get(state.family)
            if family is None:
                family = self._families[state.family] = _FamilySlots()
            family.append(slot, state, evidence)
        self._n_followed = len(evidence)

    def near(self, state: KeyState, states: list[KeyState], fields: FieldBook) -> tuple[Ints, Floats]:
        """Slots of the family with the nearest size classes, and their rows."""
        family = self._families.get(state.family)
        if family is None:
            return np.zeros(0, np.int64), np.zeros((0, 6))
        return family.near(state, states, fields)


class _FamilySlots:
    def __init__(self) -> None:
        self._slots: list[int] = []
        self._owners: list[int] = []
        self._candidates: list[Candidate] = []
        self._made_from: list[Field | None] = []
        self._classes = np.zeros(0)
        self._rows = np.zeros((0, 6))

    def append(self, slot: int, state: KeyState, evidence: Evidence) -> None:
        at = len(self._slots)
        if at >= len(self._classes):
            more = max(64, at)
            self._classes = np.concatenate([self._classes, np.zeros(more)])
            self._rows = np.concatenate([self._rows, np.full((more, 6), np.nan)])
        self._classes[at] = state.key.size_class
        self._slots.append(slot)
        self._owners.append(state.index)
        self._candidates.append(evidence.candidates[slot])
        self._made_from.append(None)

    def near(self, state: KeyState, states: list[KeyState], fields: FieldBook) -> tuple[Ints, Floats]:
        gaps = np.abs(self._classes[: len(self._slots)] - state.key.size_class)
        chosen = np.argpartition(gaps, MAX_POINTS)[:MAX_POINTS] if len(gaps) > MAX_POINTS else np.arange(len(gaps))
        n_new, kept = 0, []
        for at in chosen.tolist():
            owner = states[self._owners[at]]
            if owner.field is None:
                if n_new >= MAX_NEW_FIELDS:
                    continue
                n_new += 1
            field = fields.of(owner)
            if self._made_from[at] is not field:
                place = field.place.get(self._candidates[at])
                self._rows[at] = np.nan if place is None else field.table[place]
                self._made_from[at] = field
            kept.append(at)
        return np.array([self._slots[at] for at in kept], dtype=np.int64), self._rows[kept]
