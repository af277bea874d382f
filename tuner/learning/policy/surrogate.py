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
from scipy.special import ndtr

from zerotune.store.records import SIZE_CLASSES_PER_OCTAVE, Candidate
from zerotune.tuner.learning.policy.change_detection import Regimes
from zerotune.tuner.learning.policy.keys import CandidateTables, Column, KeyState
from zerotune.tuner.learning.policy.observations import AT_ONCE, CallEvidence
from zerotune.tuner.modeling.features import Floats, Ints
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
    octaves: float = 5.0
    """By which sizes differ until that fades; twice as many for what fills a link, half as many of channels.

    On 102 machines of the family 5 saves more and loses less than 3; with 8 `rtx5090_loopback` finds nothing any more.
    """
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


class Known(NamedTuple):
    """What was measured: where (rows as in `CandidateTable.table`), in which regime, and against which guesses."""

    rows: Floats
    regime: Ints
    residual: Floats
    """Measured minus guessed (log)."""
    noise_variance: Floats
    """Of the measured mean."""


def covariance(first: Floats, second: Floats) -> Floats:
    """Covariance of the guesses' errors in units of their spreads; rows as in `CandidateTable.table`, n by m."""
    one, two = first.T[:, :, None], second.T
    sizes, channels = (np.abs(one[at] - two[at]) for at in (Column.log2_bytes, Column.log2_channels))
    same_cell = (one[Column.protocol] == two[Column.protocol]) & (one[Column.algorithm] == two[Column.algorithm])
    near = matern(sizes / KERNEL.octaves)
    shared: Floats = (KERNEL.by_cell * same_cell + KERNEL.by_others) * near
    shared += KERNEL.by_others * same_cell * near * matern(channels / (0.5 * KERNEL.octaves))
    fill = one[Column.transfer_share] * two[Column.transfer_share]
    fill *= np.minimum(one[Column.octaves_fewer], two[Column.octaves_fewer])
    shared += KERNEL.fill * (1.0 + same_cell) * fill * matern(sizes / (2.0 * KERNEL.octaves))
    shared *= np.where(one[Column.collective] == two[Column.collective], 1.0, KERNEL.across_collectives)
    shared += KERNEL.own * (same_cell & (channels == 0) & (one[Column.key] == two[Column.key]))
    return shared


def condition(rows: Floats, known: Known, common_std: float, regime: int = 0) -> tuple[Floats, Floats]:
    """Condition durations on what is known (Gaussian process).

    Args:
        rows: as in `CandidateTable.table`, shape [n, columns].
        known: m measured points.
        common_std: of an error (log) that all guesses on the machine share.
        regime: whose durations are asked for.

    Returns:
        Mean and standard deviation of the log durations, each [n].
    """
    n, guess, std, places = len(rows), rows[:, Column.guess], rows[:, Column.std], known.rows
    changed = CHANGE_STD**2 * (regime != 0)
    fill = 2.0 * KERNEL.fill * rows[:, Column.octaves_fewer] * rows[:, Column.transfer_share] ** 2
    # The diagonal of `covariance`.
    own = std**2 * (fill + KERNEL.by_cell + 2.0 * KERNEL.by_others + KERNEL.own) + common_std**2 + changed
    if not len(known.residual):
        return guess, np.sqrt(own)
    every = np.concatenate([rows, places])
    both = covariance(every, places)
    both *= every[:, Column.std, None] * places[:, Column.std]
    both += common_std**2
    if regime or np.count_nonzero(known.regime):
        regimes = np.concatenate([np.full(n, regime), known.regime])
        sizes = np.subtract.outer(every[:, Column.log2_bytes], places[:, Column.log2_bytes])
        is_same = np.equal.outer(regimes, known.regime) & (known.regime != 0)
        both += CHANGE_STD**2 * matern(np.abs(sizes) / KERNEL.octaves) * is_same
    cross, inner = both[:n], both[n:]
    inner.flat[:: len(inner) + 1] += known.noise_variance + 1e-9
    solved = np.linalg.solve(inner, np.concatenate([known.residual[None], cross]).T)
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

    def __init__(self, tables: CandidateTables, regimes: Regimes) -> None:
        self.tables = tables
        self.regimes = regimes

    @property
    def evidence(self) -> CallEvidence:
        """Of the regime in force."""
        return self.regimes.evidence

    def posterior(self, state: KeyState) -> tuple[Floats, Floats]:
        """What every option of a key is expected to take; kept as `state.last_posterior`.

        Mean (log us; infinite: not available) and standard deviation (log), each [n_options], the baseline first.
        """
        table, common_std = self.tables.of(state).table, self.tables.family(state.family).doubt_in_common
        usable, rows = np.isfinite(table[:, Column.guess]), np.where(np.isnan(table), 0.0, table)
        mean, spread = condition(rows, self._near(state), common_std, self.evidence.regime)
        state.last_posterior = np.where(usable, mean, np.inf), np.where(usable, spread, 1e-3)
        return state.last_posterior

    def _near(self, state: KeyState) -> Known:
        """What was measured at the nearest sizes: AT_ONCE settings now, and of those before what ran last."""
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
                    continue  # of what has no field yet some wait for a later call
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
