"""Machines on which environments may be tried, job by job: random ones that are like recorded ones, and recorded ones.

Under each environment the calls of a step take a multiple of their usual time, by size. A random machine's multiples
are drawn as in `machine_family`, with the statistics of eleven recordings of environments or builds. A step is
computation and the exposed share of its calls. The ranges below `EXPOSED` are assumptions.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.data.machine_family import NEARLY, Kind
from benchmarks.lib.data.recorded_grids import load as load_grids
from zerotune.store.records import BASELINE

Floats = NDArray[np.float64]
Range = tuple[float, float]

N_ENVIRONMENTS: Final = (2, 10)
N_SIZES: Final = (4, 22)
LEAST_LOG2_BYTES: Final = 12.0
GAINING: Final[Range] = (0.1, 0.7)
"""Share of (size, environment) pairs that are faster than usual."""
LARGEST_GAIN: Final[Range] = (0.05, 0.85)
THE_SAME: Final[Range] = (0.1, 0.8)
NEVER_SLOW: Final = 0.25
SLOW2: Final[Range] = (0.02, 0.55)
SLOW10_SHARE: Final[Range] = (0.0, 0.3)
ALIKE: Final[Range] = (0.4, 0.98)
OF_THE_ENVIRONMENT: Final[Range] = (0.0, 0.8)

# Assumed: no recording shows these.
EXPOSED: Final[Range] = (0.02, 0.4)
"""Share of the usual step's time that waits for calls."""
CRASHES: Final = 0.04
"""Share of environments under which a job fails."""
JOBS_DIFFER: Final[Range] = (0.003, 0.02)
"""Spread (log) of the step times of equal jobs; tails as Student's t of 4 degrees."""
WANDERS: Final[Range] = (0.001, 0.01)
"""Standard deviation (log) by which the level wanders in a day."""
HOURS_APART: Final[Range] = (1.0, 72.0)
STEPS: Final[Range] = (200.0, 20_000.0)
STEP_NOISE: Final[Range] = (0.003, 0.1)
JOBS_OF_A_GRID: Final = 10
"""Workloads that are played on each recorded grid."""


@dataclass(frozen=True)
class Machine:
    """One workload on one machine, with its steps' times under each environment."""

    name: str
    ratios: tuple[float, ...]
    """Step time under each environment over the usual one."""
    crashes: tuple[bool, ...]
    jobs_differ: float
    wanders: float
    hours_apart: float
    steps: float
    step_noise: float
    elsewhere: tuple[tuple[float, float], ...] = ()
    """The increase (log) of calls' times under each environment and its deviation, with equal weights of all sizes.

    A book has such figures from jobs with other calls on the same hardware.
    """

    @property
    def gain(self) -> float:
        """The share of a usual step that the best environment that runs saves."""
        return 1.0 - float(min(1.0, *np.where(self.crashes, math.inf, self.ratios)))

    def with_nothing_to_gain(self) -> Machine:
        """The same machine, but faster environments take as long as the usual one."""
        return replace(self, ratios=tuple(max(1.0, one) for one in self.ratios))

    def with_all_alike(self) -> Machine:
        """The same machine, but every environment runs and takes as long as the usual one."""
        return replace(self, ratios=(1.0,) * len(self.ratios), crashes=(False,) * len(self.ratios))


def draw(seed: int) -> Machine:
    rng = np.random.default_rng([seed, 54])
    n_environments = int(rng.integers(N_ENVIRONMENTS[0], N_ENVIRONMENTS[1] + 1))
    ratios, usual_us = grid(rng, n_environments)
    calls = rng.dirichlet(np.full(len(usual_us), 0.5))
    return with_jobs(f"machine_{seed}", ratios, calls * usual_us, rng)


def grid(rng: np.random.Generator, n_environments: int) -> tuple[Floats, Floats]:
    """Times of calls over usual ones, shape (n_environments, n_sizes), and usual times by size."""
    n_sizes = int(rng.integers(N_SIZES[0], N_SIZES[1] + 1))
    log2_bytes: Floats = np.arange(float(n_sizes)) + rng.uniform(LEAST_LOG2_BYTES, 32.0 - n_sizes + 2.0)
    keys = rng.uniform(*GAINING)
    gaining = 1.0 - (1.0 - keys) ** (1.0 / math.sqrt(n_environments))
    slow2 = 0.0 if rng.random() < NEVER_SLOW else rng.uniform(*SLOW2) * (1.0 - gaining)
    slow10 = slow2 * rng.uniform(*SLOW10_SHARE)
    same = gaining + rng.uniform(*THE_SAME) * (1.0 - slow2 - gaining)
    least = math.log(1.0 - rng.uniform(*LARGEST_GAIN))
    kind = Kind(
        (0.0, gaining / 3.0, gaining, same, 1.0 - slow2, 1.0 - slow10, 1.0),
        (least, least / 5.0, -NEARLY, NEARLY, math.log(2.0), math.log(10.0), math.log(30.0)),
        rng.uniform(*ALIKE),
        rng.uniform(*OF_THE_ENVIRONMENT),
        0.005,
    )
    ratios: Floats = np.exp(next(kind.log_ratios(rng, n_environments, log2_bytes)))
    return ratios, between(rng, (8.0, 250.0)) + 2.0**log2_bytes / (1000.0 * between(rng, (0.6, 250.0)))


def with_jobs(name: str, ratios: Floats, weights_us: Floats, rng: np.random.Generator) -> Machine:
    """A machine of a grid, with assumed jobs.

    Args:
        ratios: of calls' times over usual ones, shape (n_environments, n_sizes).
        weights_us: the usual total time of the calls of each size in a step.
    """
    exposed = between(rng, EXPOSED)
    step_ratios = 1.0 - exposed + exposed * ratios @ weights_us / weights_us.sum()
    return Machine(
        name,
        tuple(step_ratios.tolist()),
        tuple((rng.random(len(ratios)) < CRASHES).tolist()),
        between(rng, JOBS_DIFFER),
        between(rng, WANDERS),
        between(rng, HOURS_APART),
        between(rng, STEPS),
        between(rng, STEP_NOISE),
        tuple((float(np.mean(one)), float(np.std(one))) for one in np.log(ratios)),
    )


def between(rng: np.random.Generator, limits: Range) -> float:
    """Log-uniform."""
    return math.exp(rng.uniform(*np.log(limits)))


Times = dict[int, dict[str, list[float]]]
"""Microseconds by size and environment; empty: the usual one."""


def recorded(folder: Path) -> Iterator[Machine]:
    """Every grid below `folder` as machines, with assumed jobs."""
    for name, times in _grids(folder):
        usual = [known for known in times.values() if "" in known]
        counts = Counter(one for known in usual for one in known if one)
        environments = sorted(one for one, n_sizes in counts.items() if 2 * n_sizes >= len(usual))
        rows = [known for known in usual if known.keys() >= {*environments}]
        if not environments or not rows:
            continue
        usual_us = np.array([np.median(one[""]) for one in rows])
        ratios = np.array([[np.median(one[arm]) for one in rows] for arm in environments]) / usual_us
        for seed in range(JOBS_OF_A_GRID):
            rng = np.random.default_rng([seed, 56])
            yield with_jobs(name, rng.permutation(ratios), usual_us, rng)


def _grids(folder: Path) -> Iterator[tuple[str, Times]]:
    """Tables with a column `environment`; if there is none, grids of forced settings."""
    tables: dict[str, Times] = {}
    for path in sorted(folder.rglob("*.tsv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                if "environment" in row:
                    name = f"{row['grid']}:{row['collective']}:{row['n_ranks']}"
                    known = tables.setdefault(name, {}).setdefault(int(row["message_bytes"]), {})
                    known.setdefault(row["environment"], []).append(float(row["duration_us"]))
    yield from tables.items()
    for grid_ in [] if tables else load_grids(folder):
        times = {
            size: {"" if one == BASELINE else str(one): us for one, us in known.items()}
            for size, known in grid_.places().items()
        }
        yield f"{grid_.name}:{grid_.collective.name}", times
