"""From what was measured to what was not: one Gaussian process over settings, message sizes and networks.

The starting guess gives every candidate a mean and a standard deviation of its log duration. Errors of that guess are
correlated: candidates of neighbouring sizes share what the fabric does, more so those of one protocol or cell, and how
many channels fill a link is about the same at all sizes. Conditioning on what was measured near the key turns a handful
of calls into an opinion about every candidate. Nothing here assumes that durations have one minimum over channels.

When the network changes, what was measured is not forgotten: all that one network (regime) measures shares how far it
is from the network that the job began with. So what took three times as long as the rest is still believed to.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from zerotune.store.records import SIZE_CLASSES_PER_OCTAVE, Candidate, CommunicatorClass
from zerotune.tuner.learning.policy.keys import Column, Field, FieldBook, KeyState
from zerotune.tuner.learning.policy.observations import AT_ONCE, CallEvidence
from zerotune.tuner.modeling.features import CostPrior, Floats, Ints
from zerotune.tuner.modeling.matern import matern


@dataclass(frozen=True)
class Kernel:
    """How errors of the starting guess hang together. The first five are shares of its variance.

    What NCCL chooses is what it believes best, so its guess is among the most flattering. If much of that error were
    taken to be about all cells, those that nobody has tried would pass for slow, too, and never be tried.
    """

    by_all: float = 0.10
    by_protocol: float = 0.10
    by_cell: float = 0.60
    by_near_channels: float = 0.10
    """Neighbouring channel counts of a cell at neighbouring sizes."""
    own: float = 0.02
    octaves: float = 3.0
    channel_octaves: float = 1.5
    across_collectives: float = 0.5
    """A cell that is slow in one collective is not surely slow in another."""
    fill: float = 0.15
    """How many channels fill a link is a guess. Per octave of channels below all of them, this share of the variance is
    added for the bandwidth part, and once more for those of one cell: what is wrong at one count is wrong at all lower
    ones.
    """
    fill_octaves: float = 6.0


KERNEL: Final = Kernel()
CHANGE_STD: Final = 0.7
"""How far (log) another network may be from the first: by a factor of two."""
CARRIED_STD: Final = 0.25
"""How far (log) a setting may be from what another network measured besides: not all settings suffer alike."""
COMMON_DOUBT: Final = 1.5
"""How far off (log) all guesses are together where nobody has described the hardware: its scale is a guess, too, and
the first calls tell it.
"""
_NO_SLOT: Final = -1


class Known(NamedTuple):
    """What was measured: where (rows as in `Field.table`), in which regime, and against which guesses."""

    rows: Floats
    regime: Ints
    residual: Floats
    """Measured minus guessed (log)."""
    noise_variance: Floats
    """Of the measured mean."""


def covariance(first: Floats, second: Floats) -> Floats:
    """Covariance of the starting guesses' errors in units of their spreads; rows as in `Field.table`, n by m."""

    def equal(column: Column) -> npt.NDArray[np.bool_]:
        return np.equal.outer(first[:, column], second[:, column])

    sizes = np.abs(np.subtract.outer(first[:, Column.log2_bytes], second[:, Column.log2_bytes]))
    channels = np.abs(np.subtract.outer(first[:, Column.log2_channels], second[:, Column.log2_channels]))
    same_protocol = equal(Column.protocol)
    same_cell = same_protocol & equal(Column.algorithm)
    near = matern(sizes / KERNEL.octaves)
    shared: Floats = (KERNEL.by_cell * same_cell + KERNEL.by_protocol * same_protocol + KERNEL.by_all) * near
    shared += KERNEL.by_near_channels * same_cell * near * matern(channels / KERNEL.channel_octaves)
    fill = np.multiply.outer(first[:, Column.transfer_share], second[:, Column.transfer_share])
    fill *= np.minimum.outer(first[:, Column.octaves_fewer], second[:, Column.octaves_fewer])
    shared += KERNEL.fill * (1.0 + same_cell) * fill * matern(sizes / KERNEL.fill_octaves)
    shared *= np.where(equal(Column.collective), 1.0, KERNEL.across_collectives)
    shared += KERNEL.own * (same_cell & (channels == 0) & equal(Column.key))
    return shared


def variance_of(rows: Floats) -> Floats:
    """The diagonal of `covariance`."""
    fill = 2.0 * KERNEL.fill * rows[:, Column.octaves_fewer] * rows[:, Column.transfer_share] ** 2
    constant = KERNEL.by_all + KERNEL.by_protocol + KERNEL.by_cell + KERNEL.by_near_channels + KERNEL.own
    variance: Floats = fill + constant
    return variance


def condition(rows: Floats, known: Known, common_std: float, regime: int = 0) -> tuple[Floats, Floats]:
    """Condition durations on what is known (Gaussian process).

    Args:
        rows: as in `Field.table`, shape [n, columns].
        known: m measured points.
        common_std: of an error (log) that all guesses on the machine share.
        regime: whose durations are asked for.

    Returns:
        Mean and standard deviation of the log durations, each [n].
    """
    n, guess, std = len(rows), rows[:, Column.guess], rows[:, Column.std]
    places = known.rows
    changed = CHANGE_STD**2 * (regime != 0)
    own = std**2 * variance_of(rows) + common_std**2 + changed
    if not len(known.residual):
        return guess, np.sqrt(own)
    every = np.concatenate([rows, places])
    both = covariance(every, places) * np.multiply.outer(every[:, Column.std], places[:, Column.std]) + common_std**2
    regimes = np.concatenate([np.full(n, regime), known.regime])
    if regimes.any():
        sizes = np.subtract.outer(every[:, Column.log2_bytes], places[:, Column.log2_bytes])
        is_same = np.equal.outer(regimes, known.regime) & (known.regime != 0)
        both += CHANGE_STD**2 * matern(np.abs(sizes) / KERNEL.octaves) * is_same
    cross, inner = both[:n], both[n:]
    inner[np.diag_indices_from(inner)] += known.noise_variance + 1e-9
    solved = np.linalg.solve(inner, np.column_stack([known.residual, cross.T]))
    variance = own - np.einsum("ij,ji->i", cross, solved[:, 1:])
    return guess + cross @ solved[:, 0], np.sqrt(np.maximum(variance, 1e-8))


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


class _Observed:
    """What ran on one communicator, with the rows (as `Field.table`) that say where they lie, made when asked for."""

    def __init__(self) -> None:
        self._at: dict[tuple[int, Candidate], int] = {}
        self._candidates: list[Candidate] = []
        self._made_from: list[Field | None] = []
        self._owner = np.zeros(0, np.int64)
        self._slot = np.zeros(0, np.int64)
        self._class = np.zeros(0)
        self._collective = np.zeros(0, np.int64)
        self._row = np.zeros((0, len(Column)))
        self._past_log_us = np.zeros(0)
        """What another regime measured last; NaN where none did."""
        self._past_variance = np.zeros(0)
        self._past_regime = np.zeros(0, np.int64)

    def append(self, slot: int, state: KeyState, evidence: CallEvidence) -> None:
        """The regime in force has a slot for a key's setting."""
        candidate = evidence.candidates[slot]
        at = self._at.setdefault((state.index, candidate), len(self._at))
        if at == len(self._candidates):
            if at >= len(self._class):
                self._grow(max(64, at))
            self._class[at], self._collective[at] = state.key.size_class, int(state.key.collective)
            self._owner[at] = state.index
            self._candidates.append(candidate)
            self._made_from.append(None)
        self._slot[at] = slot

    def _grow(self, more: int) -> None:
        fillers = {"_slot": _NO_SLOT, "_past_log_us": np.nan}
        for name, old in vars(self).items():
            if isinstance(old, np.ndarray):
                added = np.full((more, *old.shape[1:]), fillers.get(name, 0), old.dtype)
                setattr(self, name, np.concatenate([old, added]))

    def leave(self, evidence: CallEvidence) -> None:
        """The regime with this evidence is left."""
        at = np.flatnonzero(self._is_measured(np.arange(len(self._at)), evidence))
        slots = self._slot[at]
        self._past_log_us[at], self._past_variance[at] = evidence.centre(slots), _noise(slots, evidence)
        self._past_regime[at] = evidence.regime
        self._slot[:] = _NO_SLOT

    def _is_measured(self, at: Ints, evidence: CallEvidence) -> npt.NDArray[np.bool_]:
        """Which of the places the regime in force has measured."""
        slots = self._slot[at]
        measured: npt.NDArray[np.bool_] = slots != _NO_SLOT
        measured[measured] = evidence.n_calls[slots[measured]] > 0
        return measured

    def near(self, state: KeyState, fields: FieldBook, evidence: CallEvidence) -> Known:
        """What was measured of AT_ONCE settings at the nearest sizes; other collectives count as two octaves off."""
        n = len(self._at)
        gaps = np.abs(self._class[:n] - state.key.size_class)
        gaps += 2 * SIZE_CLASSES_PER_OCTAVE * (self._collective[:n] != int(state.key.collective))
        chosen = np.argpartition(gaps, AT_ONCE)[:AT_ONCE] if n > AT_ONCE else np.arange(n)
        at = self._with_rows(chosen, fields)
        now = at[self._is_measured(at, evidence)]
        past = at[np.isfinite(self._past_log_us[at]) & (self._past_regime[at] != evidence.regime)]
        slots, rows = self._slot[now], self._row[np.concatenate([now, past])]
        regime = np.concatenate([np.full(len(now), evidence.regime), self._past_regime[past]])
        log_us = np.concatenate([evidence.centre(slots), self._past_log_us[past]])
        variance = np.concatenate([_noise(slots, evidence), self._past_variance[past] + CARRIED_STD**2])
        known = np.isfinite(log_us) & np.isfinite(rows[:, Column.guess])
        rows = rows[known]
        return Known(rows, regime[known], log_us[known] - rows[:, Column.guess], variance[known])

    def _with_rows(self, chosen: Ints, fields: FieldBook) -> Ints:
        """Those of the places whose rows are up to date by now."""
        n_new, kept = 0, []
        for at in chosen.tolist():
            owner = fields.states[self._owner[at]]
            field = owner.field
            if field is None:
                if n_new >= AT_ONCE // 6:  # left out until a later call
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


class Surrogate:
    """Posterior opinions about the keys of one job.

    The evidence of the regime in force is passed in; when another regime comes into force, `leave` takes the old one's.
    """

    def __init__(self, costs: CostPrior) -> None:
        self.fields = FieldBook(costs)
        self._places: defaultdict[CommunicatorClass, _Observed] = defaultdict(_Observed)
        self._n_followed = 0
        """Slots of the regime in force that have their places."""

    def posterior(self, state: KeyState, evidence: CallEvidence) -> tuple[Floats, Floats]:
        """What every option of a key is expected to take; kept as `state.opinion`.

        Mean (log us; infinite: not available) and standard deviation (log), each [n_options], the baseline first.
        """
        fields, table = self.fields, self.fields.of(state).table
        self._follow(evidence)
        known = self._places[state.key.communicator].near(state, fields, evidence)
        common_std = COMMON_DOUBT if fields.is_guesswork(state.family) else fields.doubt_in_common(state.family)
        usable = np.isfinite(table[:, Column.guess])
        mean, spread = condition(np.nan_to_num(table), known, common_std, evidence.regime)
        state.opinion = np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)
        return state.opinion

    def leave(self, evidence: CallEvidence) -> None:
        """The regime with this evidence is in force no longer."""
        self._follow(evidence)
        for places in self._places.values():
            places.leave(evidence)
        self._n_followed = 0

    def _follow(self, evidence: CallEvidence) -> None:
        """Take in slots made since the last call."""
        for slot in range(self._n_followed, len(evidence)):
            state = self.fields.states[int(evidence.key[slot])]
            self._places[state.key.communicator].append(slot, state, evidence)
        self._n_followed = len(evidence)
