"""Points and strategies without processes: measurements are drawn from a fabric's truth."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.records import (
    BASELINE,
    Collective,
    CommunicatorClass,
    Outcome,
)
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.offline.sweep.grid import GridPoint, make_grid
from zerotune.tuner.offline.sweep.strategy import BUDGET, LOOK_REPEATS, Active, FullGrid

SIZES = [1 << exponent for exponent in range(12, 25, 2)]


class Simulated:
    """Visits points as a sweep would, on a fabric's truth with its noise."""

    def __init__(self, name: str, communicator: CommunicatorClass) -> None:
        self.fabric = fabric.load(name)
        self.communicator = communicator
        self.chance = np.random.default_rng(1)
        self.topology = self.fabric.topology(communicator)
        offered = {
            collective.name: tuple((int(a), int(p)) for a, p in self.fabric.cells(communicator, collective))
            for collective in (Collective.all_gather, Collective.reduce_scatter)
        }
        channels = self.fabric.max_channels(communicator)
        self.points = make_grid(
            (Collective.all_gather, Collective.reduce_scatter), SIZES, communicator, channels, offered
        )

    def truth_us(self, point: GridPoint) -> float:
        place, candidate = point.place, point.candidate
        if candidate == BASELINE:
            candidate = cost_model.default_choice(self.topology, place.collective, place.message_bytes)
        return self.fabric.truth_us(
            self.communicator,
            place.collective,
            candidate.algorithm,
            candidate.protocol,
            candidate.n_channels,
            place.message_bytes,
        )

    def visit(self, point: GridPoint, n_samples: int) -> None:
        noise = self.chance.lognormal(0, 0.03, n_samples)
        point.duration_us += (self.truth_us(point) * noise).tolist()

    def active(self, budget: float = BUDGET) -> Active:
        return Active(self.points, self.communicator, CostPrior(self.fabric.describe()), None, 0.03, 30, budget)

    def regrets(self, strategy: Active) -> list[float]:
        """By place: what the choice costs in truth over the best there is."""
        by_setting = {(point.place, point.candidate): point for point in self.points}
        found = []
        for place, choice in strategy.choices().items():
            best_us = min(self.truth_us(point) for point in self.points if point.place == place)
            assert choice.candidate is not None
            found.append(self.truth_us(by_setting[place, choice.candidate]) / best_us - 1)
        return found


@pytest.mark.parametrize(
    ("name", "communicator"),
    [("ethernet_boxes", CommunicatorClass(4, 4)), ("h100_node", CommunicatorClass(8, 1))],
)
def test_active_finds_the_best_with_a_part_of_the_grid(name: str, communicator: CommunicatorClass):
    sweep = Simulated(name, communicator)
    strategy = sweep.active()
    while visits := strategy.next_round():
        for point in visits:
            sweep.visit(point, LOOK_REPEATS)
    n_samples = sum(len(point.duration_us) for point in sweep.points)
    full = Simulated(name, communicator)
    grid = FullGrid(full.points, 0.03, 30)
    while visits := grid.next_round():
        for point in visits:
            full.visit(point, 6)
    n_grid = sum(len(point.duration_us) for point in full.points)
    regrets = sweep.regrets(strategy)
    assert n_samples <= 0.15 * n_grid
    assert len(regrets) == len(SIZES) * 2
    assert sum(regrets) / len(regrets) <= 0.02
    assert max(regrets) < 0.1
    done, at_most = strategy.progress()
    assert done == n_samples <= at_most
    assert sweep.active().next_round() == [], "the same samples: nothing is left to do"
    unlimited = sweep.active(budget=1.0)
    while visits := unlimited.next_round():
        for point in visits:
            sweep.visit(point, LOOK_REPEATS)
    assert unlimited.unsettled() == set()
    assert sum(len(point.duration_us) for point in sweep.points) < 0.6 * n_grid, "settled long before the budget"


def test_active_ends_when_everything_is_broken():
    sweep = Simulated("ethernet_boxes", CommunicatorClass(2, 2))
    strategy = sweep.active()
    n_visits = 0
    while visits := strategy.next_round():
        for point in visits:
            point.outcome = Outcome.failed
            n_visits += 1
    assert n_visits == len(sweep.points)
