"""What a sweep no longer tries after settings hung or failed."""

from __future__ import annotations

from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Outcome, Protocol
from zerotune.tuner.offline.sweep.broken import leave_out
from zerotune.tuner.offline.sweep.grid import GridPoint, Place

RING_1, RING_2, RING_4 = (Candidate(Algorithm.ring, Protocol.simple, n) for n in (1, 2, 4))
LL_1 = Candidate(Algorithm.ring, Protocol.ll, 1)
SIZES = (4096, 8192, 16384, 32768)


def grid(collective: Collective = Collective.all_gather) -> dict[tuple[Candidate, int], GridPoint]:
    return {
        (candidate, size): GridPoint(Place(collective, size), candidate)
        for candidate in (BASELINE, RING_1, RING_2, RING_4, LL_1)
        for size in SIZES
    }


def left_out(points: dict[tuple[Candidate, int], GridPoint]) -> set[tuple[Candidate, int]]:
    leave_out(list(points.values()))
    return {key for key, point in points.items() if point.is_left_out}


def test_one_failure_says_nothing_of_other_sizes():
    points = grid()
    points[RING_1, 4096].outcome = Outcome.hung
    assert left_out(points) == set()


def test_a_setting_that_broke_twice_is_not_tried_again_at_any_size():
    points = grid()
    points[RING_2, 4096].duration_us = [1.0]
    for size in (4096, 8192):
        points[RING_1, size].outcome = Outcome.hung
    assert left_out(points) == {(RING_1, 16384), (RING_1, 32768)}
    assert not points[RING_1, 16384].is_seen
    assert points[RING_1, 16384].is_done(0.03, 30)
    assert left_out(points) == {(RING_1, 16384), (RING_1, 32768)}, "what was not tried is no further evidence"


def test_an_algorithm_and_protocol_that_never_worked_is_given_up():
    points = grid()
    for candidate in (RING_1, RING_2, RING_4):
        points[candidate, 4096].outcome = Outcome.failed
    assert left_out(points) == {(one, size) for one in (RING_1, RING_2, RING_4) for size in SIZES[1:]}


def test_but_not_one_that_worked_somewhere():
    points = grid()
    for candidate in (RING_1, RING_2, RING_4):
        points[candidate, 4096].outcome = Outcome.failed
    points[RING_4, 32768].duration_us = [1.0]
    assert left_out(points) == set()


def test_nccls_own_choice_stays():
    points = grid()
    for size in SIZES[:3]:
        points[BASELINE, size].outcome = Outcome.failed
    assert left_out(points) == set()
    assert not points[BASELINE, SIZES[3]].is_done(0.03, 30)
