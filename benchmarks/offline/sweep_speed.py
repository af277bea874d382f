"""How fast a sweep measures settings, and how much of the grid the active one needs.

    python -m benchmarks sweep_speed [--json] [--quick] [--data DIR]

`settings_per_minute_ratio_relaunch`: settings per minute in one process group by switching plans, over one
launch per setting as nccl-tests needs it (here: the same workers, started anew for each setting).
`active_share_of_grid`, `active_regret`: samples that the active sweep takes over those of the full grid at the
same precision, and what its choices cost in truth over the full grid's, mean over places; without processes. Beside
it stands the regret of as many samples spread evenly.
Measurements are drawn from the truth of every shipped fabric with its noise; with `--data` from the repetitions of
every grid recorded below that folder instead (lib/data/recorded_grids.py), with 3 % noise on top. Of those a single
sample may decide a whole place, so small ones are drawn more often, and the mean's standard error is printed.
`active_minus_even_worst_se`: of the recorded grids, the largest excess of the active sweep's regret over that of
exactly as many samples spread evenly, in standard errors of the paired difference over draws.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.lib.argument_types import a_folder
from benchmarks.lib.data import recorded_grids
from benchmarks.lib.reporting import Result, options_of, report, say
from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.errors import FabricError
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Protocol
from zerotune.tuner.modeling.cost_prior import CostPrior
from zerotune.tuner.offline.sweep.grid import MIN_REPEATS, GridPoint, Place, make_grid
from zerotune.tuner.offline.sweep.protocol import Measure
from zerotune.tuner.offline.sweep.strategy import LOOK_REPEATS, Active, FullGrid, Strategy
from zerotune.tuner.offline.sweep.workers import WorkerGroup

FABRIC = "ethernet_boxes"
PRECISION, MAX_REPEATS = 0.03, 30
COLLECTIVES = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce)
SIZES = [1 << exponent for exponent in range(12, 27)]
RECORDED_SIGMA = 0.03
RECORDED_CHANNELS = 4
N_DRAWS = 3
RECORDED_PLACES = 1600
"""Of recorded grids so many places are swept in all: the fewer a grid has, the more draws."""
QUICK_SHARE = 8
SHARE_AIM = 0.15


@dataclass
class Outcome:
    """Active against full sweep on one machine, one seed."""

    name: str
    n_places: int
    share: float
    regrets: list[float]
    even_regret: float
    """Mean, of exactly as many samples spread evenly over the points."""


@dataclass
class Machine:
    """A machine to sweep: its points, what they cost in truth, how samples are drawn."""

    name: str
    communicator: CommunicatorClass
    costs: Callable[[], CostPrior]
    points: Callable[[], list[GridPoint]]
    truth_us: Callable[[GridPoint], float]
    sample_us: Callable[[GridPoint, int, np.random.Generator], np.ndarray]
    n_draws: int = N_DRAWS
    is_recorded: bool = False

    def compare(self, seed: int) -> Outcome:
        """Both sweeps."""
        chance = np.random.default_rng(seed)
        grid, active = self.points(), self.points()
        self._run(FullGrid(grid, PRECISION, MAX_REPEATS), MIN_REPEATS, chance)
        strategy = Active(active, self.communicator, self.costs(), None, PRECISION, MAX_REPEATS)
        self._run(strategy, LOOK_REPEATS, chance)
        even = self.points()
        n_active = sum(len(point.duration_us) for point in active)
        for point, n_samples in zip(even, spread_evenly(n_active, len(even), chance), strict=True):
            point.duration_us += self.sample_us(point, n_samples, chance).tolist()
        best = fastest(grid)
        by_setting = {(point.place, point.candidate): point for point in active}
        regrets = []
        for place, choice in strategy.choices().items():
            assert choice.candidate is not None
            chosen = by_setting[place, choice.candidate]
            regrets.append(self.truth_us(chosen) / self.truth_us(best[place]) - 1)
        n_grid = sum(len(point.duration_us) for point in grid)
        return Outcome(self.name, len(best), n_active / n_grid, regrets, self._regret(fastest(even), best))

    def _regret(self, chosen: dict[Place, GridPoint], best: dict[Place, GridPoint]) -> float:
        return mean(self.truth_us(chosen[place]) / self.truth_us(point) - 1 for place, point in best.items())

    def _run(self, strategy: Strategy, n_repeats: int, chance: np.random.Generator) -> None:
        while visits := strategy.next_round():
            for point in visits:
                point.duration_us += self.sample_us(point, n_repeats, chance).tolist()


def fastest(points: Iterable[GridPoint]) -> dict[Place, GridPoint]:
    """By place, the point with the least median; the first one, NCCL's own choice, where none has a sample."""
    best: dict[Place, GridPoint] = {}
    for point in points:
        known = best.setdefault(point.place, point)
        if point.duration_us and not known.median_us <= point.median_us:
            best[point.place] = point
    return best


def spread_evenly(n_samples: int, n_points: int, chance: np.random.Generator) -> list[int]:
    """Share samples out as evenly as possible; which points get one more is up to chance."""
    each, n_more = divmod(n_samples, n_points)
    return [each + (rank < n_more) for rank in chance.permutation(n_points).tolist()]


def standard_errors(differences: Sequence[float]) -> float:
    """Their mean in its standard errors."""
    average, error = mean(differences), stdev(differences) / len(differences) ** 0.5
    return average / error if error else math.copysign(math.inf, average) if average else 0.0


def emulated(name: str, communicator: CommunicatorClass) -> Machine:
    """A shipped fabric."""
    known = fabric.load(name)
    topology = known.topology(communicator)

    def points() -> list[GridPoint]:
        offered = {
            collective.name: tuple((int(a), int(p)) for a, p in known.cells(communicator, collective))
            for collective in COLLECTIVES
        }
        return make_grid(COLLECTIVES, SIZES, communicator, known.max_channels(communicator), offered)

    def truth_us(point: GridPoint) -> float:
        place, ran = point.place, point.candidate
        if ran == BASELINE:
            ran = cost_model.default_choice(topology, place.collective, place.message_bytes)
        return known.truth_us(
            communicator, place.collective, ran.algorithm, ran.protocol, ran.n_channels, place.message_bytes
        )

    def sample_us(point: GridPoint, n_samples: int, chance: np.random.Generator) -> np.ndarray:
        return truth_us(point) * chance.lognormal(0, known.noise.sigma, n_samples)

    label = f"{name} {communicator.n_ranks}x{communicator.n_nodes}"
    return Machine(label, communicator, lambda: CostPrior(known.describe()), points, truth_us, sample_us)


def recorded(grid: recorded_grids.Grid) -> Machine:
    """A grid that somebody published; its truth is the median of the repetitions."""
    places = grid.places()

    def points() -> list[GridPoint]:
        return [
            GridPoint(Place(grid.collective, size), candidate)
            for size, found in places.items()
            for candidate in sorted(found, key=lambda one: (one != BASELINE, str(one)))
        ]

    def recorded_us(point: GridPoint) -> list[float]:
        return sorted(places[point.place.message_bytes][point.candidate])

    def truth_us(point: GridPoint) -> float:
        times = recorded_us(point)
        return times[(len(times) - 1) // 2]

    def sample_us(point: GridPoint, n_samples: int, chance: np.random.Generator) -> np.ndarray:
        return chance.choice(recorded_us(point), n_samples) * chance.lognormal(0, RECORDED_SIGMA, n_samples)

    label = f"{grid.name.split('/')[-1]} {grid.collective.name} {grid.n_ranks}x{grid.n_nodes}"
    communicator = CommunicatorClass(grid.n_ranks, grid.n_nodes)
    costs = CostPrior({"comm_channels": RECORDED_CHANNELS})
    return Machine(
        label, communicator, lambda: costs, points, truth_us, sample_us, max(10, RECORDED_PLACES // len(places)), True
    )


def machines(data: Path | None, *, quick: bool) -> Iterator[Machine]:
    """Every shipped fabric, or every recorded grid."""
    if data is not None:
        yield from map(recorded, recorded_grids.load(data))
        return
    for name in fabric.names():
        for communicator in communicators(name, quick=quick):
            yield emulated(name, communicator)


def communicators(name: str, *, quick: bool) -> list[CommunicatorClass]:
    """The fabric as a whole, and a part of it."""
    known = fabric.load(name)
    counts = {known.max_ranks} if quick else {known.max_ranks, min(known.ranks_per_node, known.max_ranks)}
    found = []
    for n_ranks in sorted(counts - {1}):
        communicator = known.communicator(range(n_ranks))
        try:
            known.topology(communicator)
        except FabricError:
            continue
        found.append(communicator)
    return found


def settings_per_minute(n_settings: int) -> float:
    """Visits in one process group, start and end included once."""
    began = time.perf_counter()
    with WorkerGroup(2, FABRIC, (Collective.all_gather,)) as group:
        for number in range(n_settings):
            group.measure(command(number), 30)
    return 60 * n_settings / (time.perf_counter() - began)


def settings_per_minute_relaunched(n_settings: int) -> float:
    """One launch per setting."""
    spent = []
    for number in range(n_settings):
        began = time.perf_counter()
        with WorkerGroup(2, FABRIC, (Collective.all_gather,)) as group:
            group.measure(command(number), 30)
        spent.append(time.perf_counter() - began)
    return 60 / median(spent)


def command(number: int) -> Measure:
    ladder = [Candidate(cell[0], cell[1], n) for cell in fabric_cells() for n in (1, 2, 4, 8)]
    size_bytes = 65536 << number // len(ladder) % 4
    return Measure(number + 1, Collective.all_gather, size_bytes, ladder[number % len(ladder)], 1, 6, check=False)


def fabric_cells() -> Sequence[tuple[Algorithm, Protocol]]:
    return fabric.load(FABRIC).cells(CommunicatorClass(2, 2), Collective.all_gather)


def main() -> None:
    parser = options_of(__doc__, quick="fewer launches, communicators and seeds")
    parser.add_argument("--data", type=a_folder, help="folder with recorded grids")
    arguments = parser.parse_args()
    swept = list(machines(arguments.data, quick=arguments.quick))
    if not swept:
        parser.error(f"--data {arguments.data}: no table below it has default and forced settings of enough sizes")
    results = []
    if arguments.data is None:
        one_group = settings_per_minute(100 if arguments.quick else 300)
        relaunched = settings_per_minute_relaunched(2 if arguments.quick else 5)
        results += [
            Result("settings_per_minute", one_group, "1/min"),
            Result("settings_per_minute_ratio_relaunch", one_group / relaunched, "", ">= 10", "one launch per setting"),
        ]
    found = []
    for one in swept:
        n_draws = max(2, one.n_draws // QUICK_SHARE) if arguments.quick else one.n_draws
        found.append([one.compare(seed) for seed in range(n_draws)])
        say(f"{one.name}: swept {len(found[-1])} times")
    outcomes = [outcome for of_machine in found for outcome in of_machine]
    shares = [mean(outcome.share for outcome in of_machine) for of_machine in found]
    regrets = [mean(mean(outcome.regrets) for outcome in of_machine) for of_machine in found]
    results += [
        Result("active_share_of_grid", mean(shares), "", f"<= {SHARE_AIM}"),
        Result("active_share_of_grid_worst_machine", max(shares), "", f"<= {SHARE_AIM}"),
        Result("active_regret", mean(regrets), "", "<= 0.02"),
        Result("active_regret_worst_machine", max(regrets), "", "<= 0.02"),
        Result("active_regret_worst_place", max(max(outcome.regrets) for outcome in outcomes), ""),
    ]
    of_grids = [drawn for machine, drawn in zip(swept, found, strict=True) if machine.is_recorded]
    if of_grids:
        above = [[mean(one.regrets) - one.even_regret for one in drawn] for drawn in of_grids]
        results += [
            Result("active_minus_even_worst_se", max(map(standard_errors, above)), "", "<= 1", "spread evenly"),
            Result("active_minus_even", mean(map(mean, above)), "", "<= 0", "spread evenly"),
        ]
    for of_machine, share, regret in zip(found, shares, regrets, strict=True):
        worst = max(max(outcome.regrets) for outcome in of_machine)
        even = mean(one.even_regret for one in of_machine)
        error = stdev(mean(outcome.regrets) for outcome in of_machine) / len(of_machine) ** 0.5
        words = f"{of_machine[0].n_places} places, mean regret {regret:.4f} +- {error:.4f}, worst place {worst:.3f}"
        excess = standard_errors([mean(outcome.regrets) - outcome.even_regret for outcome in of_machine])
        words += f", spread evenly {even:.4f} ({excess:+.1f} standard errors)"
        results.append(Result(f"share {of_machine[0].name}", share, "", f"<= {SHARE_AIM}", words))
    report("sweep_speed", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
