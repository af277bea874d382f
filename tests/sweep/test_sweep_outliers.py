"""Where samples contradict each other, and what is looked at again because of it."""

from __future__ import annotations

import numpy as np

from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Outcome, Protocol
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.offline.sweep import outliers
from zerotune.tuner.offline.sweep.grid import GridPoint, Place
from zerotune.tuner.offline.sweep.strategy import BUDGET, Active

SIMPLE = Candidate(Algorithm.ring, Protocol.simple)
LL = Candidate(Algorithm.ring, Protocol.ll)


def point(size_kib: int, duration_us: list[float], candidate: Candidate = BASELINE) -> GridPoint:
    return GridPoint(Place(Collective.all_gather, size_kib << 10), candidate, duration_us)


def test_what_leaps_out_of_both_its_neighbours_is_doubted_and_what_grows_is_not():
    growing = [point(1 << n, [10.0 * 1.9**n]) for n in range(8)]
    assert outliers.leaps(growing) == []
    for factor in (3.0, 0.2):
        growing[4].duration_us = [10.0 * 1.9**4 * factor]
        found = outliers.leaps(growing)
        assert growing[4] in found
        assert all(abs(growing.index(one) - 4) <= 1 for one in found), "or beside it: it is their neighbour"
    growing[4].duration_us *= 2
    assert growing[4] not in outliers.leaps(growing), "it was seen twice"


def test_other_settings_and_broken_ones_are_no_neighbours():
    points = [point(1, [10.0]), point(2, [90.0], LL), point(4, [12.0])]
    assert outliers.leaps(points) == []
    points[1] = GridPoint(points[1].place, BASELINE, [90.0], Outcome.failed)
    assert outliers.leaps(points) == []


def test_two_samples_that_differ_are_a_contradiction_until_there_is_a_third():
    one = point(1, [10.0, 14.0])
    assert outliers.contradictions([one, point(2, [10.0, 12.0])]) == [one]
    one.duration_us.append(10.0)
    assert outliers.contradictions([one]) == []


def test_roughness_is_local():
    points = [point(1 << n, [10.0, 30.0] if n < 4 else [10.0, 10.1]) for n in range(16)]
    found = outliers.roughness(points)
    assert min(found[one.place] for one in points[:3]) > outliers.ROUGH_SHARE
    assert max(found[one.place] for one in points[7:]) < 0.05
    assert 0.15 < outliers.outlier_share(points) < 0.25
    assert set(outliers.roughness([point(1, [10.0])]).values()) == {0.0}, "one sample contradicts nobody"


def test_who_was_never_as_fast_as_the_leaders_slowest_is_out():
    leader, rival, beaten, unseen = (
        point(1, [10.0, 20.0, 11.0]),
        point(1, [19.0, 30.0]),
        point(1, [21.0, 22.0]),
        point(1, []),
    )
    assert outliers.contenders([leader, rival, beaten, unseen]) == [leader, rival, unseen]
    assert outliers.contenders([point(1, [9.0]), point(1, [90.0])]) != [], "single samples throw nobody out"


def test_at_a_rough_place_nobody_leads_before_all_who_may_win_were_seen_twice():
    first, second = point(1, [10.0, 30.0, 10.0]), point(1, [20.0], SIMPLE)
    assert outliers.leader([first, second]) is None
    second.duration_us.append(9.0)
    assert outliers.leader([first, second]) is first
    second.duration_us.append(8.0)
    assert outliers.leader([first, second, point(1, [90.0, 80.0], LL)]) is second


def test_rough_places_get_a_few_samples_each_the_fewest_first():
    rough, smooth = Place(Collective.all_gather, 1024), Place(Collective.all_gather, 2048)
    by_place = {
        rough: [GridPoint(rough, BASELINE, [10.0, 30.0]), GridPoint(rough, SIMPLE, [11.0])],
        smooth: [GridPoint(smooth, BASELINE, [10.0]), GridPoint(smooth, SIMPLE, [])],
    }
    of = {rough: 0.5, smooth: 0.0}
    for n in range(2, outliers.ROUGH_SAMPLES + 1):
        (chosen,) = outliers.rough_looks(by_place, of)
        assert chosen is by_place[rough][1] or len(chosen.duration_us) < n
        chosen.duration_us.append(11.0)
    while looks := outliers.rough_looks(by_place, of):
        looks[0].duration_us.append(11.0)
    assert [len(one.duration_us) for one in by_place[rough]] == [outliers.ROUGH_SAMPLES] * 2
    assert [len(one.duration_us) for one in by_place[smooth]] == [1, 0]


def test_a_setting_that_is_fast_once_in_three_calls_is_not_chosen_for_it():
    """NCCL's own choice takes twice as long in two of three calls, at four sizes in a row."""
    sizes = [1 << exponent for exponent in range(14, 26)]
    points = [GridPoint(Place(Collective.all_gather, size), one) for size in sizes for one in (BASELINE, SIMPLE)]
    wrong = 0
    for seed in range(8):
        for one in points:
            one.duration_us.clear()
        strategy = Active(points, CommunicatorClass(2, 2), CostPrior({"comm_channels": 4}), None, 0.03, 30)
        chance = np.random.default_rng(seed)
        while visits := strategy.next_round():
            for one in visits:
                usual_us = 2000.0 + one.place.message_bytes / 1e3
                is_slow = (
                    one.candidate == BASELINE and one.place.message_bytes in sizes[4:8] and chance.random() < 2 / 3
                )
                one.duration_us.append(usual_us * (2.0 if is_slow else 1.0) * chance.lognormal(0, 0.04))
        choices = strategy.choices()
        wrong += sum(choices[Place(Collective.all_gather, size)].candidate == BASELINE for size in sizes[4:8])
        assert sum(len(one.duration_us) for one in points) <= BUDGET * 30 * len(points)
    assert wrong <= 5, "of 32; a sample of each, and a coin where both are fast, is wrong in one of six"


def test_on_a_rugged_machine_a_winner_that_no_neighbour_foretells_is_looked_at():
    """The end of the budget is kept for settings that were never measured at a size."""
    settings = [BASELINE, *(Candidate(Algorithm.ring, protocol) for protocol in Protocol)]
    sizes = [1 << exponent for exponent in range(14, 26)]
    regrets = []
    for seed in range(3):
        chance = np.random.default_rng(seed)
        points = [GridPoint(Place(Collective.all_gather, size), one) for size in sizes for one in settings]
        truth_us = {id(one): 1000.0 * chance.lognormal(0, 0.5) for one in points}
        strategy = Active(points, CommunicatorClass(2, 2), CostPrior({"comm_channels": 4}), None, 0.03, 30)
        while visits := strategy.next_round():
            for one in visits:
                one.duration_us.append(truth_us[id(one)] * chance.lognormal(0, 0.03))
        choices = strategy.choices()
        for size in sizes:
            here = [one for one in points if one.place.message_bytes == size]
            (chosen,) = [one for one in here if one.candidate == choices[one.place].candidate]
            regrets.append(truth_us[id(chosen)] / min(truth_us[id(one)] for one in here) - 1)
    assert np.mean(regrets) < 0.02
    assert max(regrets) < 0.2
