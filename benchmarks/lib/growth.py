"""Whether processes grow: memory and open files over a long run, as slopes with their intervals of confidence."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import psutil

from benchmarks.lib.reporting import Result

WARM_UP: Final = 0.4
"""Share of the run in which caches fill and nothing is judged."""
N_BLOCKS: Final = 12
"""Successive samples are alike, so the line goes through the means of so many blocks of them."""
PAGE_BYTES: Final = resource.getpagesize()
"""The unit of memory: one more in a block of samples is a rounding, not a slope."""
CONFIDENCE: Final = 0.95
FOUND: Final = 0.9
"""The reported size of a leak is one that a run finds with this probability."""


@dataclass
class Growth:
    samples: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    """By a process's name: how far the run was, private memory in bytes, open files."""

    def look(self, at: float, pids: Mapping[str, int]) -> None:
        """Sample each process that runs; `at` is the progress of the run, in units of the caller's."""
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                memory = process.memory_info()
                if memory.rss == 0:  # it has ended, and nobody has asked for its exit code
                    continue
                sample = at, float(memory.rss - memory.shared), float(process.num_fds())
                self.samples.setdefault(name, []).append(sample)

    def results(self, per: float, unit: str) -> list[Result]:
        """For each process: memory and open files at the end, their growth, and the growth that would be found.

        The target is met if growth cannot be told from noise: the interval's lower end is at most one page of memory
        for each block of samples, or 0 files.

        Args:
            per: length of the run, in units of `look`, over which slopes are given.
            unit: the name of this length.
        """
        found = []
        for name, samples in self.samples.items():
            kept = np.array(samples[int(WARM_UP * len(samples)) :])
            if len(kept) < 2 * N_BLOCKS:
                continue
            of_block = (kept[-1, 0] - kept[0, 0]) / per / N_BLOCKS
            for column, what, scale, step in ((1, "KiB", 1024.0, PAGE_BYTES), (2, "files", 1.0, 0.0)):
                slope, low, high = slope_of(kept[:, 0] / per, kept[:, column] / scale)
                seen_from = (high - slope) * power_factor()
                limit = step / scale / of_block
                found += [
                    Result(f"{name}_{what}_at_the_end", float(kept[-1, column] / scale), what),
                    Result(f"{name}_{what}_growth", slope, f"{what} per {unit}"),
                    Result(f"{name}_{what}_growth_low", low, f"{what} per {unit}", f"<= {limit:.4g}"),
                    Result(f"{name}_{what}_growth_high", high, f"{what} per {unit}"),
                    Result(f"{name}_{what}_growth_seen_from", seen_from, f"{what} per {unit}"),
                ]
        return found


def power_factor() -> float:
    """A slope must be this multiple of half an interval for its lower end to be above 0 in FOUND of all runs."""
    from scipy import stats  # a second to load

    degrees = N_BLOCKS - 2
    return float(1.0 + stats.t.ppf(FOUND, degrees) / stats.t.ppf(0.5 + CONFIDENCE / 2, degrees))


def slope_of(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """The slope of a random walk with drift, and the ends of its interval of confidence.

    An allocator keeps its memory, so the increments between blocks of samples are independent, not their levels. Steps
    between means of a random walk are correlated: their variance is 2/3 of the long-run variance (Working, Note on
    the correlation of first differences of averages in a random chain, 1960).

    Args:
        x, y: float (n,), n at least N_BLOCKS; x rises.
    """
    from scipy import stats  # a second to load

    blocks = [np.array_split(values, N_BLOCKS) for values in (x, y)]
    at, level = (np.array([block.mean() for block in some]) for some in blocks)
    steps = np.diff(level)
    reach = stats.t.ppf(0.5 + CONFIDENCE / 2, len(steps) - 1) * stats.sem(steps) * np.sqrt(1.5)
    per_block = (at[-1] - at[0]) / len(steps)
    slope = steps.mean()
    return float(slope / per_block), float((slope - reach) / per_block), float((slope + reach) / per_block)
