"""From what was measured to what was not: one Gaussian process over settings, message sizes and networks.

The starting guess gives every candidate a mean and a standard deviation of its log duration. Errors of that guess are
correlated: candidates of neighbouring sizes share what the fabric does, more so those of one cell, and how
many channels fill a link is about the same at all sizes. Conditioning on what was measured near the key turns a handful
of calls into an opinion about every candidate. Nothing here assumes that durations have one minimum over channels.

When the network changes, what was measured is not forgotten: all that one network (regime) measures shares how far it
is from the network that the job began with. So what took three times as long as the rest is still believed to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from zerotune.store.records import SIZE_CLASSES_PER_OCTAVE
from zerotune.tuner.learning.policy.keys import Column, FieldBook, KeyState
from zerotune.tuner.learning.policy.observations import CallEvidence
from zerotune.tuner.modeling.features import CostPrior, Floats, Ints
from zerotune.tuner.modeling.matern import matern


@dataclass(frozen=True)
class Kernel:
    """How errors of the starting guess hang together. The first four are shares of its variance.

    What NCCL chooses is what it believes best, so its guess is among the most flattering. If much of that error were
    taken to be about all cells, those that nobody has tried would pass for slow, too, and never be tried.
    """

    by_all: float = 0.10
    by_cell: float = 0.70
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
NEAREST: Final = 48
"""Measured settings that an opinion rests on: bounds its time."""
REGIMES: Final = 3
"""Newest ones that are remembered beside the one in force: a change may pass through others for a moment."""
CHANGE_STD: Final = 0.7
"""How far (log) another network may be from the first: by a factor of two."""
CARRIED_STD: Final = 0.25
"""How far (log) a setting may be from what another network measured besides: not all settings suffer alike."""


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
    same_cell = equal(Column.protocol) & equal(Column.algorithm)
    near = matern(sizes / KERNEL.octaves)
    shared: Floats = (KERNEL.by_cell * same_cell + KERNEL.by_all) * near
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
    constant = KERNEL.by_all + KERNEL.by_cell + KERNEL.by_near_channels + KERNEL.own
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


class Surrogate:
    """Posterior opinions about the keys of one job.

    The evidence of the regime in force is passed in; when another regime comes into force, `leave` takes the old one's.
    """

    def __init__(self, costs: CostPrior) -> None:
        self.fields = FieldBook(costs)
        self._left: list[CallEvidence] = []
        """Of the regimes that were in force before, one of each, oldest first."""

    def posterior(self, state: KeyState, evidence: CallEvidence) -> tuple[Floats, Floats]:
        """What every option of a key is expected to take; kept as `state.opinion`.

        Mean (log us; infinite: not available) and standard deviation (log), each [n_options], the baseline first.
        """
        fields, table = self.fields, self.fields.of(state).table
        known = self._near(state, evidence)
        usable = np.isfinite(table[:, Column.guess])
        common_std = fields.doubt_in_common(state.family)
        mean, spread = condition(np.nan_to_num(table), known, common_std, evidence.regime)
        state.opinion = np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)
        return state.opinion

    def leave(self, evidence: CallEvidence) -> None:
        """The regime with this evidence is in force no longer."""
        others = [one for one in self._left if one.regime != evidence.regime]
        self._left = [*others, evidence][-REGIMES:]

    def _near(self, state: KeyState, evidence: CallEvidence) -> Known:
        """What was measured at the nearest sizes: NEAREST settings of this regime, and of each before.

        Other collectives count as two octaves off.
        """
        fields, n_new = self.fields, 0
        rows: list[Floats] = []
        taken: list[tuple[Floats, Floats, Ints]] = []
        past = [one for one in self._left if one.regime != evidence.regime]
        for one in (evidence, *past):
            keys = one.key[: len(one)]
            is_here = (fields.communicator[keys] == fields.communicator[state.index]) & (one.n_calls[: len(one)] > 0)
            measured = np.flatnonzero(is_here)
            gaps = np.abs(fields.size_class[keys[measured]] - state.key.size_class)
            gaps += 2 * SIZE_CLASSES_PER_OCTAVE * (fields.collective[keys[measured]] != int(state.key.collective))
            slots = []
            for slot in measured[np.argsort(gaps, kind="stable")[:NEAREST]].tolist():
                owner = fields.states[keys[slot]]
                if owner.field is None:
                    n_new += 1
                    if n_new > NEAREST // 6:
                        continue  # until a later call
                field = owner.field or fields.of(owner)
                place = field.place.get(one.candidates[slot])
                if place is not None:
                    rows.append(field.table[place])
                    slots.append(slot)
            at = np.array(slots, np.int64)
            noise = one.sigma(one.key[at]) ** 2 / (one.n_units[at] + 1.0)
            carried = 0.0 if one is evidence else CARRIED_STD**2
            taken.append((one.centre(at), noise + carried, np.full(len(at), one.regime)))
        table = np.array(rows).reshape(-1, len(Column))
        log_us, variance, regime = (np.concatenate(some) for some in zip(*taken, strict=True))
        known = np.isfinite(log_us) & np.isfinite(table[:, Column.guess])
        return Known(table[known], regime[known], (log_us - table[:, Column.guess])[known], variance[known])
