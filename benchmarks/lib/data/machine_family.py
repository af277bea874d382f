"""Random machines that are like recorded ones, so that a policy is judged on machines that it was not tuned to.

At each size, a setting takes a multiple of the time of NCCL's own choice. A latent curve over sizes gives the
multiple, so that near sizes have near values. A quantile function has the recordings' gains and catastrophes.
The numbers below were chosen so that draws match the statistics of 25 recordings that are kept aside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from benchmarks.lib.data.data_sets import Problem
from benchmarks.lib.simulated.host_view import HostView
from zerotune.store.records import (
    BASELINE,
    SIZE_CLASSES_PER_OCTAVE,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    size_class,
)
from zerotune.store.sqlite.rows.runnable import runnable_cells

Floats = NDArray[np.float64]
Range = tuple[float, float]

# Ranges that the recorded machines cover.
COLLECTIVES: Final = (Collective.all_reduce, Collective.all_gather, Collective.reduce_scatter, Collective.broadcast)
N_KEYS: Final = (2, 300)
MOST_SIZES: Final = 75
"""Of one collective: all four have 300 keys."""
LEAST_LOG2_BYTES, MOST_LOG2_BYTES = 10.0, 32.0
"""1 KiB to 4 GiB."""
MOST_LOG2_RANKS: Final = 11.0
MOST_SETTINGS: Final = 10
"""Beside NCCL's own choice: all cells of an all-reduce. Six were recorded at most."""
WRONG_BY: Final[Range] = (1.3, 7.0)
"""Factor by which NCCL's own choice is slower at one size."""
NOISE: Final[Range] = (0.001, 0.06)
NOISE_MIDDLE, NOISE_SCATTER = 0.005, 0.9
"""Spread (log) of repeated calls: the limits, the median, and the standard deviation (log) between machines."""
NOTHING_TO_GAIN: Final = 0.2
"""Share of machines: two recorded ones gain 0.2 % at most, and five more gain at one size in ten or fewer."""
NEVER_SLOW: Final = 0.25
"""Share of machines without a setting that is twice as slow: six of 25."""
HAS_SLOW10: Final = 0.4
"""Share of the others that have a setting ten times as slow: seven of 19."""
BUSY_ALIKE: Final = 0.6
"""Correlation of the latent curves with those beside another job: it moved the ninetieth gain from 2 to 42 %."""

# Fitted, so that draws have the quantiles of the recordings.
KEYS_WITH_GAIN: Final[Range] = (0.15, 0.7)
LARGEST_GAIN: Final[Range] = (0.05, 0.85)
"""Share of keys at which some setting is faster, and of such a key's time at most."""
ENVIRONMENTS, MOST_KEYS = 0.04, 0.8
"""Share of machines at which most keys have a faster setting, as in another environment; and share of these keys."""
GAIN_KEPT_POWER: Final = 3.0
"""The largest calls keep a share of a gain (log), which is a uniform draw to this power: links bound them.

Half of the machines then have 2 % of all time to gain, as recorded ones do.
"""
THE_SAME: Final[Range] = (0.1, 0.8)
NEARLY: Final = 0.008
"""Share of the settings between faster and twice as slow that differ from NCCL's own choice by this much (log) only."""
SLOW2: Final[Range] = (0.02, 0.7)
SLOW10_SHARE: Final[Range] = (0.08, 0.3)
"""Share of (key, setting) pairs that are twice as slow, and of these that are ten times as slow, if any are."""
ALIKE: Final[Range] = (0.7, 0.98)
"""Correlation of the latent curves at sizes an octave apart."""
OF_THE_SETTING: Final[Range] = (0.0, 0.6)
"""Share of the latent curves' variance that belongs to the setting at all sizes."""
WRONG_AT_ONE_SIZE: Final = 0.25
"""Share of machines on which NCCL's own choice is slower at one size: largest gains are 70 % or more on six of 25."""

# Assumed: the recordings do not show these.
LATENCY_US: Final[Range] = (8.0, 250.0)
BANDWIDTH_GBS: Final[Range] = (0.6, 250.0)
"""Of NCCL's own choice: from sockets to NVLink."""
SLOWEST: Final = 30.0
"""Factor over NCCL's own choice."""
TAIL_FREEDOM: Final = 3.0
"""Degrees of freedom of the noise (Student's t): single calls take a multiple of the spread."""
BUSY_SLOWER: Final[Range] = (1.2, 3.0)
"""Factor by which all is slower beside another job."""
MOST_AHEAD, MOST_LOOKS_EVERY = 3, 4
"""Steps by which the device lags, and steps between two requests for a plan, at most."""
STEP_NOISE: Final[Range] = (0.003, 0.1)
"""Spread (log) of computation."""


@dataclass(frozen=True)
class Machine:
    """Keys of one machine in three states, and the view of a job on it."""

    name: str
    problems: list[Problem]
    busy: list[Problem]
    """Beside another job: all is slower, and the order of settings differs."""
    namesake: list[Problem]
    """Another machine with the same name."""
    view: HostView
    looks_every: int
    """Steps between two requests for a plan."""
    step_noise: float
    """Spread (log) of computation."""

    def with_nothing_to_gain(self) -> list[Problem]:
        """Its keys, but every gain takes 3 % longer than NCCL's own choice."""
        return [
            replace(one, truth_us=(one.truth_us[0], *(max(us, 1.03 * one.truth_us[0]) for us in one.truth_us[1:])))
            for one in self.problems
        ]


def with_tails(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Noise of calls, of spread 1, in which single calls stand out."""
    return rng.standard_t(TAIL_FREEDOM, shape) / math.sqrt(TAIL_FREEDOM / (TAIL_FREEDOM - 2.0))


def draw(seed: int) -> Machine:
    rng = np.random.default_rng([seed, 14])
    n_ranks = round(2.0 ** rng.uniform(1.0, MOST_LOG2_RANKS))
    place = CommunicatorClass(n_ranks, -(-n_ranks // int(rng.choice([1, 4, 8]))))
    n_keys = round(_between(rng, N_KEYS))
    n_collectives = int(rng.integers(-(-n_keys // MOST_SIZES), min(len(COLLECTIVES), n_keys) + 1))
    latency_us, bandwidth_gbs = _between(rng, LATENCY_US), _between(rng, BANDWIDTH_GBS)
    n_settings = int(rng.integers(1, MOST_SETTINGS + 1))
    kind = Kind.draw(rng, n_settings)
    wrong = np.zeros(n_keys)
    if rng.random() < WRONG_AT_ONE_SIZE:
        wrong[rng.integers(n_keys)] = math.log(_between(rng, WRONG_BY))
    gain_kept = rng.random() ** GAIN_KEPT_POWER
    slower = (1.0, _between(rng, BUSY_SLOWER), 1.0)
    states: tuple[list[Problem], list[Problem], list[Problem]] = ([], [], [])
    for at, collective in enumerate(rng.permutation(COLLECTIVES)[:n_collectives].tolist()):
        log2_bytes = _sizes(rng, len(range(at, n_keys, n_collectives)))
        cells = runnable_cells(Collective(collective), place.n_nodes)
        settings = [Candidate(*cells[cell]) for cell in rng.permutation(len(cells))[:n_settings]]
        for state, factor, ratios in zip(states, slower, kind.log_ratios(rng, len(settings), log2_bytes), strict=True):
            for size, log_ratios in zip(2.0**log2_bytes, ratios.T, strict=True):
                usual_us = latency_us + size / (1000.0 * bandwidth_gbs)
                kept = 1.0 - (1.0 - gain_kept) * (1.0 - latency_us / usual_us)
                log_ratios = np.where(log_ratios < 0.0, kept, 1.0) * log_ratios
                times_us = factor * usual_us * np.exp([wrong[len(state)], *log_ratios])
                key = DecisionKey(place, Collective(collective), Phase.other, size_class(math.ceil(size)))
                state.append(
                    Problem(key, math.ceil(size), (BASELINE, *settings), BASELINE, tuple(times_us.tolist()), kind.noise)
                )
    view = HostView(int(rng.integers(MOST_AHEAD + 1)), is_exposure_known=False)
    looks_every = int(rng.integers(1, MOST_LOOKS_EVERY + 1))
    return Machine(f"machine_{seed}", *states, view, looks_every, _between(rng, STEP_NOISE))


class Kind(NamedTuple):
    shares: tuple[float, ...]
    """Of (key, setting) pairs whose log ratio is below those of `log_ratios_there`."""
    log_ratios_there: tuple[float, ...]
    alike: float
    of_the_setting: float
    noise: float

    @classmethod
    def draw(cls, rng: np.random.Generator, n_settings: int) -> Kind:
        keys = rng.uniform(*KEYS_WITH_GAIN)
        chance = rng.random()
        keys = 0.0 if chance < NOTHING_TO_GAIN else MOST_KEYS if chance > 1.0 - ENVIRONMENTS else keys
        gaining = 1.0 - (1.0 - keys) ** (1.0 / n_settings)
        slow2 = 0.0 if rng.random() < NEVER_SLOW else rng.uniform(*SLOW2) * (1.0 - gaining)
        slow10 = slow2 * rng.uniform(*SLOW10_SHARE) * (rng.random() < HAS_SLOW10)
        least = math.log(1.0 - rng.uniform(*LARGEST_GAIN))
        same = gaining + rng.uniform(*THE_SAME) * (1.0 - slow2 - gaining)
        return cls(
            (0.0, gaining / 2.0, gaining, same, 1.0 - slow2, 1.0 - slow10, 1.0),
            (least, least / 2.0, -NEARLY, NEARLY, math.log(2.0), math.log(10.0), math.log(SLOWEST)),
            rng.uniform(*ALIKE),
            rng.uniform(*OF_THE_SETTING),
            float(np.clip(NOISE_MIDDLE * math.exp(rng.normal(0.0, NOISE_SCATTER)), *NOISE)),
        )

    def log_ratios(self, rng: np.random.Generator, n_settings: int, log2_bytes: Floats) -> Iterator[Floats]:
        """Settings' times over those of NCCL's own choice: usually, beside another job, and on another machine.

        Args:
            n_settings: without NCCL's own choice.
            log2_bytes: ascending.

        Yields:
            Logarithms, shape (n_settings, n_sizes).
        """
        usual, other = (self._curves(rng, n_settings, log2_bytes) for _ in range(2))
        for curves in (usual, BUSY_ALIKE * usual + math.sqrt(1.0 - BUSY_ALIKE**2) * other, other):
            scatter = rng.normal(0.0, self.noise, curves.shape)
            yield np.interp(ndtr(curves), self.shares, self.log_ratios_there) + scatter

    def _curves(self, rng: np.random.Generator, n_settings: int, log2_bytes: Floats) -> Floats:
        """Gaussian, of variance 1 at every size, shape (n_settings, n_sizes)."""
        step = rng.standard_normal((n_settings, len(log2_bytes)))
        for at, octaves in enumerate(np.diff(log2_bytes), 1):
            alike = self.alike**octaves
            step[:, at] = alike * step[:, at - 1] + math.sqrt(1.0 - alike**2) * step[:, at]
        own = rng.standard_normal((n_settings, 1))
        curves: Floats = math.sqrt(1.0 - self.of_the_setting) * step + math.sqrt(self.of_the_setting) * own
        return curves


def _between(rng: np.random.Generator, limits: Range) -> float:
    """Log-uniform."""
    return math.exp(rng.uniform(*np.log(limits)))


def _sizes(rng: np.random.Generator, n_sizes: int) -> Floats:
    """Ascending sizes (log2), one for each size class, an octave apart if there is room."""
    octaves = 1.0 if n_sizes <= MOST_LOG2_BYTES - LEAST_LOG2_BYTES else 1.0 / SIZE_CLASSES_PER_OCTAVE
    last = math.ceil(rng.uniform(LEAST_LOG2_BYTES + octaves * (n_sizes - 1), MOST_LOG2_BYTES))
    found: Floats = last + octaves * np.arange(1 - n_sizes, 1, dtype=np.float64)
    return found
