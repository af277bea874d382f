"""How fast a sweep measures settings, and how much of the grid the active one needs.

    python benchmarks/sweep_speed.py [--json] [--quick]

`settings_per_minute_ratio_relaunch`: settings per minute in one process group by switching plans, over one
launch per setting as nccl-tests needs it (here: the same workers, started anew for each setting).
`active_share_of_grid`, `active_regret`: samples that the active sweep takes over those of the full grid at the
same precision, and the mean and worst true cost of what it chose over the grid's best, on every shipped
fabric; measurements are drawn from the fabric's truth with its noise, without processes.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from statistics import mean, median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from reporting import Result, report

from agent.nccl import cost_model, fabric
from store.errors import FabricError
from store.records import BASELINE, Candidate, Collective, CommunicatorClass
from tuner.features import CostPrior
from tuner.knowledge import Knowledge
from tuner.sweep.cells import MIN_REPEATS, Cell, Place, make_cells
from tuner.sweep.protocol import Measure
from tuner.sweep.strategy import LOOK_REPEATS, Active, FullGrid, Strategy
from tuner.sweep.workers import WorkerGroup

FABRIC = "ethernet_boxes"
PRECISION, MAX_REPEATS = 0.03, 30
COLLECTIVES = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce)
SIZES = [1 << exponent for exponent in range(12, 27)]


@dataclass
class Outcome:
    """One fabric's comparison."""

    name: str
    share: float
    regrets: list[float]


class Truth:
    """Draws measurements from a fabric."""

    def __init__(self, name: str, communicator: CommunicatorClass, seed: int) -> None:
        self.fabric = fabric.load(name)
        self.communicator = communicator
        self.topology = self.fabric.topology(communicator)
        self.chance = np.random.default_rng(seed)

    def cells(self) -> list[Cell]:
        offered = {
            collective.name: tuple((int(a), int(p)) for a, p in self.fabric.cells(self.communicator, collective))
            for collective in COLLECTIVES
        }
        channels = self.fabric.max_channels(self.communicator)
        return make_cells(COLLECTIVES, SIZES, self.communicator, channels, offered)

    def us(self, cell: Cell) -> float:
        place, candidate = cell.place, cell.candidate
        if candidate == BASELINE:
            candidate = cost_model.default_choice(self.topology, place.collective, place.message_bytes)
        n_channels = candidate.n_channels
        return self.fabric.truth_us(
            self.communicator,
            place.collective,
            candidate.algorithm,
            candidate.protocol,
            n_channels,
            place.message_bytes,
        )

    def run(self, strategy: Strategy, n_repeats: int) -> None:
        while visits := strategy.next_round():
            for cell in visits:
                noise = self.chance.lognormal(0, self.fabric.noise.sigma, n_repeats)
                cell.duration_us += (self.us(cell) * noise).tolist()


def compare(name: str, communicator: CommunicatorClass, seed: int) -> Outcome:
    truth = Truth(name, communicator, seed)
    grid, active = truth.cells(), truth.cells()
    truth.run(FullGrid(grid, PRECISION, MAX_REPEATS), MIN_REPEATS)
    costs = CostPrior(truth.fabric.describe())
    truth.run(Active(active, communicator, costs, Knowledge.empty(), PRECISION, MAX_REPEATS), LOOK_REPEATS)
    share = sum(len(cell.duration_us) for cell in active) / sum(len(cell.duration_us) for cell in grid)
    chosen, best = winners(active), winners(grid)
    regrets = [truth.us(chosen[place]) / truth.us(best[place]) - 1 for place in best]
    return Outcome(f"{name} {communicator.n_ranks}x{communicator.n_nodes}", share, regrets)


def winners(cells: list[Cell]) -> dict[Place, Cell]:
    """The measured best of each place."""
    found: dict[Place, Cell] = {}
    for cell in cells:
        known = found.get(cell.place)
        if cell.duration_us and (known is None or cell.median_us < known.median_us):
            found[cell.place] = cell
    return found


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


def fabric_cells() -> tuple:
    return fabric.load(FABRIC).cells(CommunicatorClass(2, 2), Collective.all_gather)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end in one line of JSON")
    parser.add_argument("--quick", action="store_true", help="fewer launches and communicators")
    arguments = parser.parse_args()
    outcomes = [
        compare(name, communicator, seed)
        for name in fabric.names()
        for communicator in communicators(name, quick=arguments.quick)
        for seed in range(1 if arguments.quick else 3)
    ]
    regrets = [regret for outcome in outcomes for regret in outcome.regrets]
    one_group = settings_per_minute(100 if arguments.quick else 300)
    relaunched = settings_per_minute_relaunched(2 if arguments.quick else 5)
    results = [
        Result("settings_per_minute", one_group, "1/min"),
        Result("settings_per_minute_ratio_relaunch", one_group / relaunched, "", ">= 10", "one launch per setting"),
        Result("active_share_of_grid", mean(outcome.share for outcome in outcomes), "", "<= 0.15"),
        Result("active_share_of_grid_worst", max(outcome.share for outcome in outcomes), "", "<= 0.15"),
        Result("active_regret", mean(regrets), "", "<= 0.02"),
        Result("active_regret_p95", float(np.percentile(regrets, 95)), "", "<= 0.02"),
        Result("active_regret_worst", max(regrets), ""),
    ]
    for outcome in outcomes:
        worst = max(outcome.regrets)
        results.append(
            Result(
                f"share {outcome.name}",
                outcome.share,
                "",
                "",
                f"mean regret {mean(outcome.regrets):.4f}, worst {worst:.3f}",
            )
        )
    report("sweep_speed", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
