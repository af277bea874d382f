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
"""Samples that follow each other are alike, so the line goes through the means of so many blocks of them."""
PAGE_BYTES: Final = resource.getpagesize()
"""What memory is counted in: one more in a block of samples is a rounding, not a slope."""
CONFIDENCE: Final = 0.95


@dataclass
class Growth:
    """What some processes have, from time to time."""

    samples: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    """By a process's name: how far the run was, private memory in bytes, open files."""

    def look(self, at: float, pids: Mapping[str, int]) -> None:
        """Take a sample of each; one that has ended has none.

        Args:
            at: how far the run is, in units of the caller's.
            pids: of processes, by name.
        """
        for name, pid in pids.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                memory = process.memory_info()
                if memory.rss == 0:  # it has ended, and nobody has asked for its exit code
                    continue
                sample = at, float(memory.rss - memory.shared), float(process.num_fds())
                self.samples.setdefault(name, []).append(sample)

    def results(self, per: float, unit: str) -> list[Result]:
        """Of each process: memory and open files at the end, and by how much they grow.

        The target is that growth cannot be told from noise: the interval's lower end is not above one page of memory
        for each block of samples, or not above nothing for files.

        Args:
            per: slopes are told for so much of the run.
            unit: what that is called.

        Returns:
            Figures, processes in the order of their first samples.
        """
        found = []
        for name, samples in self.samples.items():
            kept = np.array(samples[int(WARM_UP * len(samples)) :])
            if len(kept) < 2 * N_BLOCKS:
                continue
            of_block = (kept[-1, 0] - kept[0, 0]) / per / N_BLOCKS
            for column, what, scale, step in ((1, "KiB", 1024.0, PAGE_BYTES), (2, "files", 1.0, 0.0)):
                slope, low, high = slope_of(kept[:, 0] / per, kept[:, column] / scale)
                limit = step / scale / of_block
                found += [
                    Result(f"{name}_{what}_at_the_end", float(kept[-1, column] / scale), what),
                    Result(f"{name}_{what}_growth", slope, f"{what} per {unit}"),
                    Result(f"{name}_{what}_growth_low", low, f"{what} per {unit}", f"<= {limit:.4g}"),
                    Result(f"{name}_{what}_growth_high", high, f"{what} per {unit}"),
                ]
        return found


def slope_of(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """The slope of a line through the means of blocks, and its interval of confidence.

    Args:
        x, y: float (n,), n at least N_BLOCKS.

    Returns:
        Slope, and the lower and upper end of its interval.
    """
    from scipy import stats  # seconds, which runs and tests that judge nothing need not wait for

    blocks = [np.array_split(values, N_BLOCKS) for values in (x, y)]
    means = [np.array([block.mean() for block in some]) for some in blocks]
    fitted = stats.linregress(*means)
    reach = stats.t.ppf(0.5 + CONFIDENCE / 2, N_BLOCKS - 2) * fitted.stderr
    return float(fitted.slope), float(fitted.slope - reach), float(fitted.slope + reach)
