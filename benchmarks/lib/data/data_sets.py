"""Data sets that policies are judged on: keys with the true time of every candidate.

They come from shipped fabrics, and from published grids (`recorded_grids`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.lib.data.recorded_grids import load as load_grids
from zerotune.agent.nccl import cost_model, fabric
from zerotune.agent.nccl.fabric_model import Fabric
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass, DecisionKey, Phase, size_class
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.modeling.cost_prior import CostPrior

Facts = Mapping[str, "str | int | float | bool"]
KINDS = (Collective.all_gather, Collective.reduce_scatter)
LEAST_NOISE, MOST_NOISE, USUAL_NOISE = 0.005, 0.3, 0.03


@dataclass(frozen=True)
class Problem:
    """One key: its candidates, the baseline first, with true medians (us) and the noise (log) of a call."""

    key: DecisionKey
    message_bytes: int
    candidates: tuple[Candidate, ...]
    ran_by_default: Candidate
    truth_us: tuple[float, ...]
    noise: float


class DataSet(NamedTuple):
    name: str
    problems: list[Problem]
    facts: Facts


class Measured(CostPrior):
    """Offers only the candidates that a data set has measured."""

    def __init__(self, facts: Facts, problems: Sequence[Problem]) -> None:
        super().__init__(facts)
        self._measured: dict[tuple[CommunicatorClass, Collective], dict[Candidate, None]] = {}
        for problem in problems:
            place = problem.key.communicator, problem.key.collective
            self._measured.setdefault(place, {}).update(dict.fromkeys(problem.candidates))

    def candidates(self, communicator: CommunicatorClass, collective: Collective) -> tuple[Candidate, ...]:
        return tuple(self._measured.get((communicator, collective), {BASELINE: None}))


def fabric_problems(
    machine: Fabric,
    facts: Facts,
    *,
    n_per_octave: float = 1.0,
    n_ranks: int = 16,
) -> list[Problem]:
    """Keys of one fabric: two collectives, 4 KiB to 128 MiB.

    Args:
        facts: the facts that a learner gets, see `Fabric.describe`.
        n_per_octave: sizes per doubling.
        n_ranks: of the communicator, at most; a smaller fabric has fewer.
    """
    place = machine.communicator(range(min(machine.max_ranks, n_ranks)))
    topology = machine.topology(place)
    costs = CostPrior(facts)
    problems = []
    for kind in KINDS:
        for exponent in np.arange(12, 27.01, 1 / n_per_octave):
            nbytes = int(2**exponent)
            ran = cost_model.default_choice(topology, kind, nbytes)
            candidates = costs.candidates(place, kind)
            truth = []
            for candidate in candidates:
                setting = ran if candidate.is_baseline else candidate
                n_channels = min(setting.n_channels, topology.comm_channels)
                us = machine.truth_us(place, kind, setting.algorithm, setting.protocol, n_channels, nbytes)
                truth.append(us)
            key = DecisionKey(place, kind, Phase.other, size_class(nbytes))
            problems.append(Problem(key, nbytes, candidates, ran, tuple(truth), machine.noise.sigma))
    return problems


def shipped(n_per_octave: float = 1.0) -> Iterator[DataSet]:
    for name in fabric.names():
        machine = fabric.load(name)
        facts = machine.describe()
        yield DataSet(name, fabric_problems(machine, facts, n_per_octave=n_per_octave), facts)


def of_folder(folder: Path) -> Iterator[DataSet]:
    for grid in load_grids(folder):
        place = CommunicatorClass(grid.n_ranks, max(1, grid.n_nodes))
        found = {
            (DecisionKey(place, grid.collective, Phase.other, size_class(nbytes)), nbytes): known
            for nbytes, known in grid.places().items()
        }
        if problems := problems_of(found):
            yield DataSet(f"{grid.name}:{grid.collective.name}", problems, {})


def problems_of(groups: Mapping[tuple[DecisionKey, int], Mapping[Candidate, Sequence[float]]]) -> list[Problem]:
    """One problem per key: the size with the most settings stands for its class."""
    best_filled: dict[DecisionKey, tuple[int, dict[Candidate, list[float]]]] = {}
    for (key, nbytes), known in _pooled(groups).items():
        if BASELINE in known and len(known) > max(1, len(best_filled.get(key, (0, {}))[1])):
            best_filled[key] = (nbytes, known)
    problems = []
    for key, (nbytes, known) in sorted(best_filled.items()):
        candidates = (BASELINE, *(one for one in known if one != BASELINE))
        spread = [np.std(np.log(times)) for times in known.values() if len(times) > 2]
        noise = float(np.clip(np.median(spread), LEAST_NOISE, MOST_NOISE)) if spread else USUAL_NOISE
        truth = tuple(float(np.median(known[one])) for one in candidates)
        problems.append(Problem(key, nbytes, candidates, BASELINE, truth, noise))
    return problems


def _pooled(
    groups: Mapping[tuple[DecisionKey, int], Mapping[Candidate, Sequence[float]]],
) -> dict[tuple[DecisionKey, int], dict[Candidate, list[float]]]:
    """Join the measurements of settings with the same effect, or the luckiest of several equal ones would seem best.

    On little traffic NCCL runs fewer channels than asked for (`cost_model.channels_used`). Joined
    settings go by the lowest count with this effect that any size asked for. The tuner does the same: it offers
    settings of one effect once.
    """
    counts: dict[tuple[CommunicatorClass, Collective], dict[Candidate, None]] = {}
    for (key, _), known in groups.items():
        counts.setdefault((key.communicator, key.collective), {}).update(dict.fromkeys(known))
    asked = {place: sorted(known, key=lambda one: one.n_channels) for place, known in counts.items()}
    pooled: dict[tuple[DecisionKey, int], dict[Candidate, list[float]]] = {}
    for (key, nbytes), known in groups.items():
        names: dict[Candidate, Candidate] = {}
        for one in asked[key.communicator, key.collective]:
            names.setdefault(cost_model.in_effect(key.collective, nbytes, one), one)
        here = pooled.setdefault((key, nbytes), {})
        for one, times in known.items():
            here.setdefault(names[cost_model.in_effect(key.collective, nbytes, one)], []).extend(times)
    return pooled


def sweep_block(problems: Sequence[Problem], seed: int = 3, n_each: int = 3) -> np.ndarray:
    """A sweep of all candidates, as MEASUREMENT of shape (n,), with `n_each` calls per key and candidate."""
    rng = np.random.default_rng(seed)
    rows = []
    for problem in problems:
        place = problem.key.communicator
        for arm, (candidate, us) in enumerate(zip(problem.candidates, problem.truth_us, strict=True)):
            ran = candidate if arm else problem.ran_by_default
            cell = (255, 255) if ran.algorithm is None else (int(ran.algorithm), int(ran.protocol or 0))
            for _ in range(n_each):
                noisy_us = us * math.exp(rng.normal(0, problem.noise))
                where = place.n_ranks, place.n_nodes, problem.message_bytes, noisy_us, 0, 0, math.nan
                what = int(problem.key.collective), 0, *cell, ran.n_channels, arm == 0, 1, 0, 4, 0
                rows.append((*where, *what))
    return np.array(rows, MEASUREMENT)
