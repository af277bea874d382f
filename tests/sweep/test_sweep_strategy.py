"""Points and strategies without processes: measurements are drawn from a fabric's truth."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Outcome,
    Protocol,
    Source,
)
from zerotune.store.sqlite.database import MEASUREMENT
from zerotune.tuner.modeling.cost_prior import CostPrior
from zerotune.tuner.offline.sweep.grid import GridPoint, Place, make_grid, message_sizes, restore
from zerotune.tuner.offline.sweep.result import rows_of
from zerotune.tuner.offline.sweep.strategy import BUDGET, LOOK_REPEATS, Active, Choice, FullGrid

PLACE = Place(Collective.all_gather, 1 << 20)
FAR = Candidate(Algorithm.ring, Protocol.ll, 4)
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


def test_nccls_own_choice_stands_at_every_place_of_an_active_sweep():
    known = Candidate(Algorithm.ring, Protocol.simple, 4)
    other = GridPoint(PLACE, FAR, [90.0, 91.0])
    points = [GridPoint(PLACE, BASELINE), GridPoint(PLACE, known, [80.0, 81.0]), other]
    rows = rows_of(points, 4, {PLACE: Choice(known, 80.0, 85.0, 0.97)})
    assert [row.setting for row in rows] == ["ring/simple/4ch", "baseline", str(FAR)], "in order of time"
    assert [row.median_us for row in rows] == [80.5, None, 90.5]


def test_active_never_returns_to_a_broken_point():
    sweep = Simulated("ethernet_boxes", CommunicatorClass(2, 2))
    strategy = sweep.active()
    n_broken = 0
    while visits := strategy.next_round():
        for point in visits:
            assert point.outcome is Outcome.ok
            if point.candidate.protocol is Protocol.ll:
                point.outcome = Outcome.hung
                n_broken += 1
            else:
                sweep.visit(point, LOOK_REPEATS)
    assert n_broken > 0


def test_active_ends_when_everything_is_broken():
    sweep = Simulated("ethernet_boxes", CommunicatorClass(2, 2))
    strategy = sweep.active()
    n_visits = 0
    while visits := strategy.next_round():
        for point in visits:
            point.outcome = Outcome.failed
            n_visits += 1
    assert n_visits == len(sweep.points)


def test_sizes_divide_among_the_ranks():
    assert message_sizes(4096, 16384, 2) == [4096, 8192, 16384]
    assert message_sizes(4096, 8192, 3) == [4104, 8196]
    assert message_sizes(1, 4, 2) == [8]


def test_channel_counts_that_come_to_the_same_are_one_point():
    offered = {"all_gather": ((1, 0), (1, 2))}
    points = make_grid([Collective.all_gather], [4096, 1 << 24], CommunicatorClass(2, 2), 16, offered)
    small = [str(point.candidate) for point in points if point.place.message_bytes == 4096]
    assert small == ["baseline", "ring/ll/1ch", "ring/simple/1ch"]
    large = [point for point in points if point.place.message_bytes == 1 << 24]
    assert len(large) == 1 + 2 * 5


def test_chunk_sizes_are_tried_beside_its_own():
    offered = {"all_gather": ((1, 2), (4, 2))}
    points = make_grid([Collective.all_gather], [4096], CommunicatorClass(2, 1), 1, offered, (65536, 131072))
    own = ["baseline", "ring/simple/1ch", "nvls/simple/1ch"]
    assert [str(point.candidate) for point in points] == [
        *own[:2], "ring/simple/1ch/64KiB", "ring/simple/1ch/128KiB", own[2]
    ]  # fmt: skip
    stored = np.zeros(2, MEASUREMENT)
    stored["collective"], stored["message_bytes"], stored["duration_us"] = Collective.all_gather, 4096, 50.0
    stored["algorithm"], stored["protocol"], stored["n_channels"], stored["source"] = 1, 2, 1, Source.sweep
    stored["chunk_bytes"] = 65536
    assert restore(points, stored) == 2
    assert [len(point.duration_us) for point in points] == [0, 0, 2, 0, 0]


def test_restore_takes_samples_and_breakages():
    points = [GridPoint(PLACE, BASELINE), GridPoint(PLACE, Candidate(Algorithm.ring, Protocol.ll, 4))]
    stored = np.zeros(4, MEASUREMENT)
    stored["collective"], stored["message_bytes"] = Collective.all_gather, 1 << 20
    stored["algorithm"], stored["protocol"], stored["n_channels"] = 1, 0, 4
    stored["duration_us"], stored["source"] = 50.0, Source.sweep
    stored["is_default"] = [1, 1, 0, 0]
    stored["outcome"] = [Outcome.ok, Outcome.outlier, Outcome.hung, Outcome.ok]
    stored["message_bytes"][3] = 777
    assert restore(points, stored) == 2
    assert points[0].duration_us == [50.0, 50.0]
    assert points[1].outcome is Outcome.hung
