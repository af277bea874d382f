"""From what was measured to what was not: one Gaussian process over a key's candidates and its measured neighbours.

The starting guess gives every candidate a mean and a standard deviation of its log duration. Errors of that guess are
correlated: candidates of neighbouring sizes share what the fabric does, more so those of one protocol or cell, and how
many channels fill a link is about the same at all sizes. Conditioning on the slots measured near the key turns a
handful of calls into an opinion about every candidate. Nothing here assumes that durations have one minimum over
channels.

When the network changes, what was measured is not forgotten: guesses are moved by what has changed at the key (its
*level*: how much longer the same settings take there than before the network changed for the first time), and what
older regimes measured says more or less what settings take that the new one has not measured yet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from zerotune.store.records import SIZE_CLASSES_PER_OCTAVE, Candidate, CommunicatorClass
from zerotune.tuner.learning.policy.keys import N_COLUMNS, Field, FieldBook, KeyState
from zerotune.tuner.learning.policy.observations import CallEvidence
from zerotune.tuner.modeling.features import CostPrior, Floats, Ints

SHARE_ALL: Final = 0.10
SHARE_PROTOCOL: Final = 0.10
SHARE_CELL: Final = 0.60
SHARE_NEAR: Final = 0.10
SHARE_OWN: Final = 0.02
"""How the variance of the starting guess splits: what all settings share, a protocol, a cell, neighbouring channel
counts of a cell at neighbouring sizes, and what belongs to one slot alone.

What NCCL chooses is what it believes best, so its guess is among the most flattering. If much of that error were taken
to be about all cells, those that nobody has tried would pass for slow, too, and never be tried.
"""
OCTAVES: Final = 3.0
CHANNEL_OCTAVES: Final = 1.5
ACROSS: Final = 0.5
"""Correlation between two collectives: a cell that is slow in one is not surely slow in another."""
FILL_ALL: Final = 0.15
FILL_CELL: Final = 0.15
FILL_OCTAVES: Final = 6.0
"""How many channels fill a link is a guess. Per octave of channels below all of them, this share of the variance is
added for the bandwidth part: what is wrong at one count is wrong at all lower ones. Cells share half of that.
"""
MAX_POINTS: Final = 48


class SettingPoints(NamedTuple):
    """Where settings lie: arrays of one length."""

    log2_bytes: Floats
    log2_channels: Floats
    algorithm: Ints
    protocol: Ints
    collective: Ints
    key: Ints
    transfer_share: Floats
    octaves_fewer: Floats

    @classmethod
    def of_table(cls, table: Floats, collective: Ints, key: Ints) -> SettingPoints:
        """From rows as in `Field.table`.

        Args:
            table: shape [n, N_COLUMNS].
            collective: of each row, shape [n].
            key: index of each row's key, shape [n].

        Returns:
            The points.
        """
        cells = table[:, 2:4].astype(np.int64)
        return cls(table[:, 0], table[:, 1], cells[:, 0], cells[:, 1], collective, key, table[:, 6], table[:, 7])

    def first(self) -> SettingPoints:
        """The first one alone."""
        return SettingPoints._make(column[:1] for column in self)


class Guess(NamedTuple):
    """Starting guesses of log durations: where they lie, their means and standard deviations."""

    place: SettingPoints
    mean: Floats
    std: Floats


class Known(NamedTuple):
    """What was measured: where, and against which guesses."""

    place: SettingPoints
    std: Floats
    """Of the guess."""
    residual: Floats
    """Measured minus guessed."""
    noise_variance: Floats
    """Of the measured mean."""


def covariance(first: SettingPoints, second: SettingPoints) -> Floats:
    """Covariance of the starting guesses' errors, in units of their spreads.

    Args:
        first: n points.
        second: m points.

    Returns:
        Shape [n, m].
    """

    def differences(name: str) -> Floats:
        gaps: Floats = getattr(first, name)[:, None] - getattr(second, name)[None, :]
        return gaps

    sizes, channels = np.abs(differences("log2_bytes")), np.abs(differences("log2_channels"))
    same_protocol = differences("protocol") == 0
    same_cell = same_protocol & (differences("algorithm") == 0)
    near = _matern(sizes * (1.0 / OCTAVES))
    shared = SHARE_CELL * same_cell
    shared += SHARE_PROTOCOL * same_protocol
    shared += SHARE_ALL
    shared *= near
    near *= _matern(channels * (1.0 / CHANNEL_OCTAVES))
    near *= SHARE_NEAR * same_cell
    shared += near
    transfers = np.multiply.outer(first.transfer_share, second.transfer_share)
    transfers *= np.minimum.outer(first.octaves_fewer, second.octaves_fewer)
    transfers *= _matern(sizes * (1.0 / FILL_OCTAVES))
    transfers *= FILL_CELL * same_cell + FILL_ALL
    shared += transfers
    shared *= np.where(differences("collective") == 0, 1.0, ACROSS)
    own: Floats = SHARE_OWN * (same_cell & (channels == 0) & (differences("key") == 0))
    own += shared
    return own


def variance_of(settings: SettingPoints) -> Floats:
    """The diagonal of `covariance`."""
    fill = (FILL_ALL + FILL_CELL) * settings.octaves_fewer * settings.transfer_share**2
    variance: Floats = SHARE_ALL + SHARE_PROTOCOL + SHARE_CELL + SHARE_NEAR + SHARE_OWN + fill
    return variance


def condition(guess: Guess, known: Known, common_std: float) -> tuple[Floats, Floats]:
    """Condition durations on what is known (Gaussian process).

    Args:
        guess: n points with starting guesses.
        known: m measured points.
        common_std: of an error (log) that all guesses on the machine share.

    Returns:
        Mean and standard deviation of the log durations, each [n].
    """
    if not len(known.residual):
        return guess.mean, guess.std
    mean, cross, solved = _conditioned(guess, known, common_std)
    variance = guess.std**2 * variance_of(guess.place) + common_std**2 - np.einsum("ij,ji->i", cross, solved)
    return mean, np.sqrt(np.maximum(variance, 1e-8))


def condition_gains(guess: Guess, known: Known, common_std: float) -> tuple[Floats, Floats]:
    """Condition gains over the first point on what is known.

    What both are off together cancels out, so the gain is surer than the durations.

    Args:
        guess: n points with starting guesses.
        known: m measured points.
        common_std: of an error (log) that all guesses on the machine share.

    Returns:
        Mean and standard deviation of the gains (log), each [n].
    """
    std = guess.std
    mean, cross, solved = _conditioned(guess, known, common_std)
    own = std**2 * variance_of(guess.place) - np.einsum("ij,ji->i", cross, solved)
    shared = covariance(guess.place.first(), guess.place)[0] * std[0] * std - cross[0] @ solved
    variance = own[0] + own - 2.0 * shared
    return mean[0] - mean, np.sqrt(np.maximum(variance, 1e-8))


def _conditioned(guess: Guess, known: Known, common_std: float) -> tuple[Floats, Floats, Floats]:
    """Means of the guesses, and what their covariance follows from.

    That is the covariance of guesses and measured residuals, shape [n, m], and the part of it that these explain,
    shape [m, n].
    """
    n, std = len(guess.std), np.concatenate([guess.std, known.std])
    everywhere = SettingPoints(*(np.concatenate(parts) for parts in zip(guess.place, known.place, strict=True)))
    both = covariance(everywhere, known.place) * (std[:, None] * known.std) + common_std**2
    cross, inner = both[:n], both[n:]
    inner[np.diag_indices_from(inner)] += known.noise_variance + 1e-9
    solved = np.asarray(np.linalg.solve(inner, np.column_stack([known.residual, cross.T])), np.float64)
    return guess.mean + cross @ solved[:, 0], cross, solved[:, 1:]


def _matern(distance: Floats) -> Floats:
    scaled = distance * math.sqrt(3.0)
    result = np.exp(-scaled)
    result *= scaled + 1.0
    return result


def expected_improvement(edge: Floats, spread: Floats) -> Floats:
    """E[max(0, edge + spread * normal)]."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = edge / spread
        density = np.exp(-0.5 * np.minimum(scaled**2, 700.0)) / math.sqrt(2.0 * math.pi)
        below = ndtr(scaled)
        result: Floats = np.where(np.isfinite(edge), edge * below + spread * density, 0.0)
    return result


def expected_excess(edge: Floats, spread: Floats) -> Floats:
    """E[max(0, exp(edge + spread * normal) - 1)]: by what share something takes longer, where it does."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = edge / spread
        mean = np.exp(np.minimum(edge + 0.5 * spread**2, 6.0))
        excess = mean * ndtr(scaled + spread) - ndtr(scaled)
        result: Floats = np.where(np.isfinite(edge), np.maximum(excess, 0.0), np.inf)
    return result


def odds_above(edge: Floats, spread: Floats) -> Floats:
    """Probability of edge + spread * normal > 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        result: Floats = np.where(np.isfinite(edge), ndtr(edge / spread), 0.0)
    return result


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


COMMON_DOUBT: Final = 1.5
"""How far off (log) all guesses are together where nobody has described the hardware: its scale is a guess, too, and
the first calls tell it.
"""


class Surrogate:
    """Posterior opinions about the keys of one job.

    The evidence of the regime in force is passed in; when another regime comes into force, `leave` takes the old one's.
    """

    def __init__(self, costs: CostPrior) -> None:
        self.fields = FieldBook(costs)
        self._places: defaultdict[CommunicatorClass, ObservedPoints] = defaultdict(ObservedPoints)
        self._n_followed = 0
        """Slots of the regime in force that have their places."""

    def posterior(self, state: KeyState, states: list[KeyState], evidence: CallEvidence) -> tuple[Floats, Floats]:
        """What every option of a key is expected to take; kept as `state.opinion`.

        Args:
            state: the key.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            Mean (log us; infinite: not available) and standard deviation (log), each [n_options], the baseline first.
        """
        usable, given = self._given(state, states, evidence)
        mean, spread = condition(*given)
        state.opinion = np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)
        return state.opinion

    def gains(self, state: KeyState, states: list[KeyState], evidence: CallEvidence) -> tuple[Floats, Floats]:
        """By how much every option of a key is faster than NCCL's own choice.

        Args:
            state: the key.
            states: of all keys, by key index.
            evidence: of the regime in force.

        Returns:
            Gain (log; -inf: not known) and its standard deviation (log), each [n_options].
        """
        usable, given = self._given(state, states, evidence)
        gain, spread = condition_gains(*given)
        return np.where(usable & usable[0], gain, -np.inf), spread

    def _given(
        self, state: KeyState, states: list[KeyState], evidence: CallEvidence
    ) -> tuple[npt.NDArray[np.bool_], tuple[Guess, Known, float]]:
        """Which options of `state` are available, and what their posterior follows from."""
        table = self.fields.of(state).table
        guess, std = table[:, 4], table[:, 5]
        usable = np.isfinite(guess)
        places = self._follow(states, evidence)[state.key.communicator]
        known = places.near(state, states, self.fields, evidence)
        collective = np.full(len(table), int(state.key.collective))
        guess = np.where(usable, guess + places.level(state), 0.0)
        lie = SettingPoints.of_table(table, collective, np.full(len(table), state.index))
        return usable, (Guess(lie, guess, std), known, self._common_std(state))

    def follow(self, states: list[KeyState], evidence: CallEvidence) -> None:
        """Follow what has changed with the network."""
        self.fields.follow()
        for places in self._follow(states, evidence).values():
            places.follow_levels(evidence)

    def leave(self, states: list[KeyState], evidence: CallEvidence) -> None:
        """The regime with this evidence is in force no longer."""
        for places in self._follow(states, evidence).values():
            places.leave(evidence)
        self._n_followed = 0

    def _common_std(self, state: KeyState) -> float:
        fields = self.fields
        return COMMON_DOUBT if fields.is_guesswork(state.family) else fields.doubt_in_common(state.family)

    def _follow(self, states: list[KeyState], evidence: CallEvidence) -> defaultdict[CommunicatorClass, ObservedPoints]:
        """Take in slots made since the last call."""
        for slot in range(self._n_followed, len(evidence)):
            state = states[int(evidence.key[slot])]
            self._places[state.key.communicator].append(slot, state, evidence.candidates[slot])
        self._n_followed = len(evidence)
        return self._places
