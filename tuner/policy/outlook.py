"""What is to be expected of every option of a key: its starting guess, conditioned on what was measured near."""

from __future__ import annotations

from collections import defaultdict
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from store.records import SIZE_CLASSES_PER_OCTAVE, Candidate, CommunicatorClass
from tuner.features import CostPrior, Floats, Ints
from tuner.policy.evidence import Evidence
from tuner.policy.field import N_COLUMNS, Field, FieldBook
from tuner.policy.posterior import MAX_POINTS, Kinship, Settings, condition, kinship_of
from tuner.policy.trial import KeyState

MAX_NEW_FIELDS: Final = 24
"""Neighbours' fields that one call may work out; the others are left out until a later call."""
MIN_TO_TUNE: Final = 12
OTHER_COLLECTIVE: Final = 2.0 * SIZE_CLASSES_PER_OCTAVE
"""So many size classes away counts what another collective measured."""
KIN_UNITS: Final = 3.0
"""Steps of evidence from which on a setting counts as measured there."""
COMMON_DOUBT: Final = 1.0
"""How far off (log) all guesses are together where nobody has described the hardware: its scale is a guess, too."""
RETUNE_GROWTH: Final = 1.3
"""Slots measured before a family is asked how far off its guesses are, and their growth until it is asked anew."""


class Outlook:
    """Posterior opinions about the keys of one job. Evidence is passed in: it changes with the regime."""

    def __init__(self, costs: CostPrior) -> None:
        self.fields = FieldBook(costs)
        self._measured: WeakKeyDictionary[Evidence, _Measured] = WeakKeyDictionary()

    def posterior(self, state: KeyState, states: list[KeyState], evidence: Evidence) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the log duration of every option of `state`, the baseline first."""
        table = self.fields.of(state).table
        guess, std = table[:, 4], table[:, 5]
        usable = np.isfinite(guess)
        family = self._families(states, evidence)[state.key.communicator]
        known = _Known.of(*family.near(state, states, self.fields), evidence)
        collective = np.full(len(table), int(state.key.collective))
        mean, spread = condition(
            np.where(usable, guess, 0.0),
            std,
            Settings.of_table(table, collective, np.full(len(table), state.index)),
            *known,
            self._kinship(family, state),
        )
        state.opinion = np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)
        return state.opinion

    def kin(self, state: KeyState, states: list[KeyState], evidence: Evidence) -> set[Candidate]:
        """What this job has measured at about the same message size in other phases of the collective."""
        return self._families(states, evidence)[state.key.communicator].kin(state, evidence)

    def retune(self, states: list[KeyState], evidence: Evidence) -> None:
        """Once much was measured since the last time, ask one family how far off its starting guesses are."""
        self.fields.follow()
        for family in self._families(states, evidence).values():
            if family.n_slots >= MIN_TO_TUNE and family.n_slots >= RETUNE_GROWTH * family.tuned_at:
                family.tuned_at = family.n_slots
                known = _Known.of(*family.spread_out(states, self.fields), evidence)
                if len(known.residual):
                    owner = states[family.first_owner]
                    family.kinship = kinship_of(*known, self._kinship(family, owner))
                return

    def _kinship(self, family: _FamilySlots, state: KeyState) -> Kinship:
        fields = self.fields
        common = COMMON_DOUBT if fields.is_guesswork(state.family) else fields.doubt_in_common(state.family)
        return family.kinship._replace(common=common)

    def _families(self, states: list[KeyState], evidence: Evidence) -> defaultdict[CommunicatorClass, _FamilySlots]:
        measured = self._measured.get(evidence)
        if measured is None:
            measured = self._measured[evidence] = _Measured()
        measured.follow(evidence, states)
        return measured.families


class _Known(NamedTuple):
    """What slots say, as `condition` wants it."""

    place: Settings
    std: Floats
    residual: Floats
    noise_variance: Floats

    @classmethod
    def of(cls, slots: Ints, rows: Floats, collectives: Ints, evidence: Evidence) -> _Known:
        known = (evidence.n_calls[slots] > 0) & np.isfinite(rows[:, 4])
        if not known.all():
            slots, rows, collectives = slots[known], rows[known], collectives[known]
        keys = evidence.key[slots]
        return cls(
            Settings.of_table(rows, collectives, keys),
            rows[:, 5],
            evidence.centre(slots) - rows[:, 4],
            evidence.sigma(keys) ** 2 / (evidence.n_units[slots] + 1.0),
        )


class _Measured:
    """The slots of one regime's evidence by family."""

    def __init__(self) -> None:
        self._n_followed = 0
        self.families: defaultdict[CommunicatorClass, _FamilySlots] = defaultdict(_FamilySlots)

    def follow(self, evidence: Evidence, states: list[KeyState]) -> None:
        """Take in slots made since the last call."""
        for slot in range(self._n_followed, len(evidence)):
            state = states[int(evidence.key[slot])]
            self.families[state.key.communicator].append(slot, state, evidence)
        self._n_followed = len(evidence)


class _FamilySlots:
    """Slots of one family, with the rows (as `Field.table`) that say where they lie, made when asked for."""

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._owners: list[int] = []
        self._candidates: list[Candidate] = []
        self._made_from: list[Field | None] = []
        self._classes = np.zeros(0)
        self._collectives = np.zeros(0, np.int64)
        self._rows = np.zeros((0, N_COLUMNS))
        self.kinship = Kinship()
        self.tuned_at = 0

    @property
    def n_slots(self) -> int:
        return len(self._slots)

    @property
    def first_owner(self) -> int:
        """Index of the key that the first slot belongs to."""
        return self._owners[0]

    def append(self, slot: int, state: KeyState, evidence: Evidence) -> None:
        at = len(self._slots)
        if at >= len(self._classes):
            more = max(64, at)
            self._classes = np.concatenate([self._classes, np.zeros(more)])
            self._collectives = np.concatenate([self._collectives, np.zeros(more, np.int64)])
            self._rows = np.concatenate([self._rows, np.full((more, N_COLUMNS), np.nan)])
        self._classes[at] = state.key.size_class
        self._collectives[at] = int(state.key.collective)
        self._slots.append(slot)
        self._owners.append(state.index)
        self._candidates.append(evidence.candidates[slot])
        self._made_from.append(None)

    def kin(self, state: KeyState, evidence: Evidence) -> set[Candidate]:
        """What was measured at keys that differ from `state` in the phase, or by the least step in size, only."""
        n_slots = len(self._slots)
        is_near = np.abs(self._classes[:n_slots] - state.key.size_class) <= 1
        is_near &= self._collectives[:n_slots] == int(state.key.collective)
        return {
            self._candidates[at]
            for at in np.flatnonzero(is_near).tolist()
            if self._owners[at] != state.index and evidence.units(self._slots[at]) >= KIN_UNITS
        }

    def near(self, state: KeyState, states: list[KeyState], fields: FieldBook) -> tuple[Ints, Floats, Ints]:
        """Slots with the nearest size classes, their rows and collectives; other collectives count as far off."""
        n_slots = len(self._slots)
        gaps = np.abs(self._classes[:n_slots] - state.key.size_class)
        gaps += OTHER_COLLECTIVE * (self._collectives[:n_slots] != int(state.key.collective))
        chosen = np.argpartition(gaps, MAX_POINTS)[:MAX_POINTS] if len(gaps) > MAX_POINTS else np.arange(len(gaps))
        return self._take(chosen, states, fields)

    def spread_out(self, states: list[KeyState], fields: FieldBook) -> tuple[Ints, Floats, Ints]:
        """Slots from everywhere, their rows and collectives."""
        chosen = np.unique(np.linspace(0, len(self._slots) - 1, MAX_POINTS).astype(np.int64))
        return self._take(chosen, states, fields)

    def _take(self, chosen: Ints, states: list[KeyState], fields: FieldBook) -> tuple[Ints, Floats, Ints]:
        n_new, kept = 0, []
        for at in chosen.tolist():
            owner = states[self._owners[at]]
            field = owner.field
            if field is None:
                if n_new >= MAX_NEW_FIELDS:
                    continue
                n_new += 1
                field = fields.of(owner)
            if self._made_from[at] is not field:
                place = field.place.get(self._candidates[at])
                self._rows[at] = np.nan if place is None else field.table[place]
                self._made_from[at] = field
            kept.append(at)
        slots = np.array([self._slots[at] for at in kept], dtype=np.int64)
        return slots, self._rows[kept], self._collectives[kept]
