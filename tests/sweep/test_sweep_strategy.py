"""Points and strategies without processes: measurements are drawn from a fabric's truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.offline.sweep.grid import GridPoint, Place, make_grid, message_sizes, restore, samples_below
from zerotune.tuner.offline.sweep.result import bus_factor, rows_of
from zerotune.tuner.offline.sweep.strategy import BUDGET, LOOK_REPEATS, Active, Choice, FullGrid
from zerotune.tuner.offline.sweep.surrogate import Surrogate

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


@pytest.mark.parametrize("others_us", [110.0, 115.0, 140.0])
def test_few_samples_are_no_certainty_and_many_make_it_one(others_us: float):
    """How far two samples spread tells little of how far the next would."""
    fast = Candidate(Algorithm.ring, Protocol.simple, 4)
    sure = []
    for n_samples in (1, 2, 30):
        noise = np.exp(0.04 * np.resize([1, -1], n_samples)) if n_samples > 1 else np.ones(1)
        points = [
            GridPoint(PLACE, one, (us * noise).tolist())
            for one, us in ((BASELINE, others_us), (fast, 100.0), (FAR, others_us))
        ]
        strategy = Active(points, CommunicatorClass(2, 2), CostPrior({"comm_channels": 4}), None, 0.03, 30)
        choice = strategy.choices()[PLACE]
        assert choice.candidate == fast
        sure.append(choice.confidence)
    assert 0.9 < sure[0] <= sure[1] <= 0.99 < sure[2] < 1


def test_an_outlier_among_two_samples_is_looked_into():
    sweep = Simulated("ethernet_boxes", CommunicatorClass(4, 4))
    strategy = sweep.active()
    point = strategy.next_round()[0]
    point.duration_us = [100.0, 180.0]
    assert point in strategy.next_round()


@pytest.mark.parametrize("outlier_share", [0.0, 0.4])
def test_single_samples_are_doubted_where_samples_contradict_each_other(outlier_share: float):
    sizes = [1 << exponent for exponent in range(12, 26)]
    candidates = [BASELINE, Candidate(Algorithm.ring, Protocol.simple), Candidate(Algorithm.ring, Protocol.ll)]
    points = [GridPoint(Place(Collective.broadcast, size), one) for size in sizes for one in candidates]
    strategy = Active(points, CommunicatorClass(2, 2), CostPrior({"comm_channels": 4}), None, 0.03, 30)
    chance = np.random.default_rng(2)
    while visits := strategy.next_round():
        for point in visits:
            usual_us = 50.0 + point.place.message_bytes / 1e4 * (1 + 0.3 * candidates.index(point.candidate))
            factor = 4.0 if chance.random() < outlier_share else 1.0
            point.duration_us.append(usual_us * factor * chance.lognormal(0, 0.01))
    taken = [len(point.duration_us) for point in points]
    assert sum(taken) <= BUDGET * 30 * len(points)  # the full grid would take all it may where samples contradict
    if outlier_share:
        assert sum(n >= 2 for n in taken) > 0.5 * len(points)
    else:
        assert sum(n >= 2 for n in taken) < 0.4 * len(points)


@pytest.mark.parametrize("n_full", [6, 30])
def test_a_full_sweep_of_some_sizes_leaves_the_others_their_budget(n_full: int):
    """However many samples it took there, each other place keeps its share; what was measured is not repeated."""
    sweep = Simulated("ethernet_boxes", CommunicatorClass(2, 2))
    gathers = {point.place for point in sweep.points if point.place.collective is Collective.all_gather}
    full = sorted(gathers)[2:5]
    for point in sweep.points:
        if point.place in full:
            sweep.visit(point, n_full)
            point.n_full_samples = n_full
    strategy, n_looks = sweep.active(), 0
    while visits := strategy.next_round():
        for point in visits:
            sweep.visit(point, LOOK_REPEATS)
            n_looks += 1
    places = {point.place for point in sweep.points}
    measured = {point.place for point in sweep.points if point.duration_us}
    assert measured == places
    assert sum(sweep.regrets(strategy)) / len(places) <= 0.02
    assert n_looks <= 0.15 * 12 * len(sweep.points), "twelve samples make a median precise at 3 % noise"
    assert sweep.active().next_round() == [], "the same samples: nothing is left to do"


def test_what_a_baseline_ran_is_one_setting_with_that_candidate():
    """Two names of one setting cannot both need measuring."""
    known = Candidate(Algorithm.ring, Protocol.simple, 4)
    points = [GridPoint(PLACE, BASELINE, [100.0] * 4, ran=known), GridPoint(PLACE, known), GridPoint(PLACE, FAR)]
    surrogate = Surrogate(points, np.zeros(3), [(1, 2, 4), (1, 2, 4), (1, 0, 4)])
    opinion = surrogate.opinions()[PLACE]
    assert opinion.mean[1] == pytest.approx(opinion.mean[0])
    assert opinion.covariance[1, 1] == pytest.approx(opinion.covariance[0, 0])
    assert opinion.covariance[2, 2] > 10 * opinion.covariance[1, 1], "another protocol stays unknown"


def test_choices_that_were_never_measured_are_rows_too():
    known = Candidate(Algorithm.ring, Protocol.simple, 4)
    choice = Choice(known, 80.0, 100.0, 0.97)
    rows = rows_of([GridPoint(PLACE, BASELINE), GridPoint(PLACE, known), GridPoint(PLACE, FAR)], 4, {PLACE: choice})
    assert [(row.setting, row.n_samples, row.median_us, row.expected_us) for row in rows] == [
        ("ring/simple/4ch", 0, None, 80.0),
        ("baseline", 0, None, 100.0),
    ]
    assert [row.is_best for row in rows] == [False, False], "neither was measured: a guess"
    assert rows[0].confidence == 0.97
    assert rows[0].gain_percent == pytest.approx(20)
    own = rows_of(
        [GridPoint(PLACE, BASELINE, [100.0]), GridPoint(PLACE, known), GridPoint(PLACE, FAR)], 4, {PLACE: choice}
    )
    assert [row.is_best for row in own] == [True, False], "what it is compared with was measured"


def test_nccls_own_choice_stands_at_every_place_of_an_active_sweep():
    known = Candidate(Algorithm.ring, Protocol.simple, 4)
    other = GridPoint(PLACE, FAR, [90.0, 91.0])
    points = [GridPoint(PLACE, BASELINE), GridPoint(PLACE, known, [80.0, 81.0]), other]
    rows = rows_of(points, 4, {PLACE: Choice(known, 80.0, 85.0, 0.97)})
    assert [row.setting for row in rows] == ["ring/simple/4ch", "baseline", str(FAR)], "in order of time"
    assert [row.median_us for row in rows] == [80.5, None, 90.5]


def test_what_is_said_of_nccls_own_choice_is_about_true_where_it_was_not_measured():
    """A gain over a time that nobody measured is worth as much as the guess of that time."""
    sweep = Simulated("few_sms_node", CommunicatorClass(8, 1))
    strategy = sweep.active()
    while visits := strategy.next_round():
        for point in visits:
            sweep.visit(point, LOOK_REPEATS)
    choices = strategy.choices()
    for point in sweep.points:
        if point.candidate == BASELINE and not point.duration_us:
            assert choices[point.place].own_us == pytest.approx(sweep.truth_us(point), rel=0.1)


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


def test_full_grid_interleaves_and_ends():
    points = [GridPoint(PLACE, Candidate(Algorithm.ring, Protocol.ll, n)) for n in range(1, 9)]
    grid = FullGrid(points, 0.03, 30)
    orders = []
    while visits := grid.next_round():
        orders.append([point.candidate.n_channels for point in visits])
        for point in visits:
            point.duration_us += np.random.default_rng(len(orders)).lognormal(4, 0.05, 6).tolist()
    assert len({tuple(order) for order in orders if len(order) == 8}) > 1, "the order must change"
    assert all(point.is_done(0.03, 30) for point in points)
    assert grid.progress() == (8, 8)


def test_a_precise_point_is_left_alone_and_the_cap_holds():
    calm, wild = GridPoint(PLACE, BASELINE), GridPoint(PLACE, Candidate(Algorithm.ring, Protocol.ll, 1))
    calm.duration_us = [100.0, 100.5, 101, 99, 99.5, 100]
    wild.duration_us = list(np.linspace(50, 200, 30))
    assert calm.is_done(0.03, 30)
    assert wild.relative_half_width > 0.03
    assert wild.is_done(0.03, 30)
    assert not wild.is_done(0.03, 31)


@given(st.integers(0, 200))
def test_median_interval_by_order_statistics(n_samples: int):
    index = samples_below(n_samples)
    if n_samples < 6:
        assert index is None
        return
    assert index is not None
    outside = 2 * sum(math.comb(n_samples, k) for k in range(index + 1)) / 2**n_samples
    assert outside <= 0.05
    one_further = 2 * sum(math.comb(n_samples, k) for k in range(index + 2)) / 2**n_samples
    assert one_further > 0.05


def test_outliers_are_marked():
    point = GridPoint(PLACE, BASELINE, [100.0, 101, 99, 100, 102, 98])
    assert point.outliers([100.0, 180.0, 103.0]) == [False, True, False]


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


def test_restore_tells_a_full_sweeps_samples_from_looks():
    point = GridPoint(PLACE, Candidate(Algorithm.ring, Protocol.ll, 4))
    stored = np.zeros(15, MEASUREMENT)
    stored["collective"], stored["message_bytes"] = Collective.all_gather, 1 << 20
    stored["algorithm"], stored["n_channels"] = 1, 4
    stored["duration_us"], stored["source"] = 50.0, Source.sweep
    stored["epoch"] = [3] * 6 + [9] * 6 + [10, 11, 12]
    assert restore([point], stored) == 15
    assert point.n_full_samples == 12


def test_rows_rank_by_speed_and_know_nccl_tests_bandwidths():
    fast = GridPoint(PLACE, Candidate(Algorithm.ring, Protocol.ll, 4), [100.0] * 6)
    own = GridPoint(PLACE, BASELINE, [200.0] * 6)
    hung = GridPoint(PLACE, Candidate(Algorithm.ring, Protocol.ll, 8), [], Outcome.hung, "no answer")
    rows = rows_of([own, hung, fast], 4)
    assert [row.setting for row in rows] == ["ring/ll/4ch", "baseline", "ring/ll/8ch"]
    assert rows[0].is_best
    assert rows[0].gain_percent == pytest.approx(50)
    assert rows[0].algbw_gbs == pytest.approx((1 << 20) / 100 / 1e3)
    assert rows[0].busbw_gbs == pytest.approx(rows[0].algbw_gbs * 0.75)
    assert rows[2].outcome == "hung"
    assert bus_factor(Collective.all_reduce, 4) == 1.5
    assert bus_factor(Collective.broadcast, 4) == 1
