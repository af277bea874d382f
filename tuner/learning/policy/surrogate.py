"""From what was measured to what was not: one Gaussian process over settings, message sizes and networks.

The starting guess gives every candidate a mean and a standard deviation of its log duration. Errors of that guess are
correlated: candidates of neighbouring sizes share what the fabric does, more so those of one cell, and how many
channels fill a link is about the same at all sizes. Conditioning on what was measured near the key turns a handful
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

from zerotune.store.records import SIZE_CLASSES_PER_OCTAVE, Candidate
from zerotune.tuner.learning.policy.change_detection import Regimes
from zerotune.tuner.learning.policy.keys import Column, FieldBook, KeyState
from zerotune.tuner.learning.policy.observations import AT_ONCE, CallEvidence
from zerotune.tuner.modeling.features import CostPrior, Floats, Ints
from zerotune.tuner.modeling.matern import matern


@dataclass(frozen=True)
class Kernel:
    """How errors of the starting guess hang together. The first three are shares of its variance.

    What NCCL chooses is what it believes best, so its guess is among the most flattering. If much of that error were
    taken to be about all cells, those that nobody has tried would pass for slow, too, and never be tried.
    """

    by_cell: float = 0.70
    by_others: float = 0.10
    """Of each: all settings, and neighbouring channel counts of a cell."""
    own: float = 0.02
    octaves: float = 3.0
    """By which sizes differ until that fades; twice as many for what fills a link, half as many of channels."""
    across_collectives: float = 0.5
    """A cell that is slow in one collective is not surely slow in another."""
    fill: float = 0.15
    """How many channels fill a link is a guess. Per octave of channels below all of them, this share of the variance is
    added for the bandwidth part, and once more for those of one cell: what is wrong at one count is wrong at all lower
    ones.
    """


KERNEL: Final = Kernel()
CHANGE_STD: Final = 0.7
"""How far (log) another network may be from the first: by a factor of two."""
CARRIED_STD: Final = 0.25
"""How far (log) a setting may be from what another network measured besides: not all settings suffer alike."""
COMMON_DOUBT: Final = 1.5
"""How far off (log) all guesses are together where nobody has described the hardware: its scale is a guess, too, and
the first calls tell it.
"""


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
    shared: Floats = (KERNEL.by_cell * same_cell + KERNEL.by_others) * near
    shared += KERNEL.by_others * same_cell * near * matern(channels / (0.5 * KERNEL.octaves))
    fill = np.multiply.outer(first[:, Column.transfer_share], second[:, Column.transfer_share])
    fill *= np.minimum.outer(first[:, Column.octaves_fewer], second[:, Column.octaves_fewer])
    shared += KERNEL.fill * (1.0 + same_cell) * fill * matern(sizes / (2.0 * KERNEL.octaves))
    shared *= np.where(equal(Column.collective), 1.0, KERNEL.across_collectives)
    shared += KERNEL.own * (same_cell & (channels == 0) & equal(Column.key))
    return shared


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
    fill = 2.0 * KERNEL.fill * rows[:, Column.octaves_fewer] * rows[:, Column.transfer_share] ** 2
    # The diagonal of `covariance`.
    own = std**2 * (fill + KERNEL.by_cell + 2.0 * KERNEL.by_others + KERNEL.own) + common_std**2 + changed
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
    inner += np.diag(known.noise_variance + 1e-9)
    solved = np.linalg.solve(inner, np.column_stack([known.residual, cross.T]))
    variance = own - np.einsum("ij,ji->i", cross, solved[:, 1:])
    return guess + cross @ solved[:, 0], np.sqrt(np.maximum(variance, 1e-8))


def expected_improvement(edge: Floats | float, spread: Floats | float) -> Floats:
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


class Surrogate:
    """Posterior opinions about the keys of one job, from what its regimes measured."""

    def __init__(self, costs: CostPrior, regimes: Regimes) -> None:
        self.fields = FieldBook(costs)
        self.regimes = regimes

    @property
    def evidence(self) -> CallEvidence:
        """Of the regime in force."""
        return self.regimes.evidence

    def posterior(self, state: KeyState) -> tuple[Floats, Floats]:
        """What every option of a key is expected to take; kept as `state.opinion`.

        Mean (log us; infinite: not available) and standard deviation (log), each [n_options], the baseline first.
        """
        fields, table, regime = self.fields, self.fields.of(state).table, self.evidence.regime
        common_std = COMMON_DOUBT if fields.is_guesswork(state.family) else fields.doubt_in_common(state.family)
        usable = np.isfinite(table[:, Column.guess])
        mean, spread = condition(np.where(np.isnan(table), 0.0, table), self._near(state), common_std, regime)
        state.opinion = np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)
        return state.opinion

    def _near(self, state: KeyState) -> Known:
        """What was measured at the nearest sizes: AT_ONCE settings now, and of those before what ran last."""
        rows: list[Floats] = []
        found: list[tuple[Floats, Floats, Floats]] = []
        n_new, seen = 0, set[tuple[int, Candidate]]()
        for evidence in reversed(self.regimes.every):
            is_past, kept = evidence is not self.evidence, []
            slots = self._nearest(state, evidence) if len(rows) < 2 * AT_ONCE else np.zeros(0, np.int64)
            for slot, key in zip(slots.tolist(), evidence.key[slots].tolist(), strict=True):
                owner, candidate = self.fields.states[key], evidence.candidates[slot]
                n_new += owner.field is None
                if (is_past and (key, candidate) in seen) or (owner.field is None and n_new > AT_ONCE // 6):
                    continue  # of what has no field yet some wait for a later call
                field = owner.field or self.fields.of(owner)
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
        places, keys = self.fields.places.T, evidence.key[: len(evidence)]
        communicator, collective, own_class = places[:, state.index].tolist()
        slots = np.flatnonzero((places[0][keys] == communicator) & (evidence.n_calls[: len(evidence)] > 0))
        if len(slots) <= AT_ONCE:
            return slots
        gaps = np.abs(places[2][keys[slots]] - own_class)
        gaps += 2 * SIZE_CLASSES_PER_OCTAVE * (places[1][keys[slots]] != collective)
        return slots[np.sort(np.argpartition(gaps, AT_ONCE)[:AT_ONCE])]
