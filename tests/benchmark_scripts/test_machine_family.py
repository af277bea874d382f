"""Drawn machines are like recorded ones, and the figures of policies on them mean what their names say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.lib.data.data_sets import DataSet
from benchmarks.lib.data.machine_family import N_KEYS, RECORDED, draw, matches, statistics_of, with_tails
from benchmarks.lib.reporting import Result
from benchmarks.policy.family_figures import (
    COLD,
    LATER,
    LONG,
    LOOKED_AT_WITHIN,
    SEALED_FAMILY_SEEDS,
    Judged,
    Played,
    judged,
    never_looked_at,
    played,
    recorded_machine,
    sealed_gap,
    together,
    warm_minus_cold,
)
from benchmarks.policy.policy_regret import FIRST_GENERATED_SEED
from benchmarks.policy.recorded_figures import JUDGED_CALLS
from benchmarks.policy.regret_policies import BoundedThompson, Later, Problem, Thompson
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    size_class,
)

MACHINES = [draw(seed) for seed in range(FIRST_GENERATED_SEED, FIRST_GENERATED_SEED + 60)]
RING, TREE = Candidate(Algorithm.ring, Protocol.ll), Candidate(Algorithm.tree, Protocol.ll)


def problem(exponent: int, *truth_us: float, noise: float = 0.01) -> Problem:
    key = DecisionKey(CommunicatorClass(8, 1), Collective.all_reduce, Phase.other, size_class(1 << exponent))
    return Problem(key, 1 << exponent, (BASELINE, RING, TREE), BASELINE, truth_us, noise)


PROBLEMS = [problem(12, 10.0, 5.0, 20.0), problem(20, 90.0, 95.0, 900.0)]


def figures(*results: Result) -> dict[str, float]:
    return {one.metric: one.value for one in results}


@pytest.mark.parametrize("name", RECORDED)
def test_statistics_of_draws_lie_among_those_of_recordings(name: str) -> None:
    found = figures(*matches([machine.problems for machine in MACHINES]))
    tenth, middle, ninetieth = RECORDED[name]
    assert tenth <= found[f"family_{name}@50th"] <= ninetieth
    assert middle < found[f"family_{name}@90th"] <= 2.0 * ninetieth


def test_draws_reach_from_small_machines_to_large_ones() -> None:
    n_keys = [len(machine.problems) for machine in MACHINES]
    assert N_KEYS[0] <= min(n_keys) < 5
    assert 150 < max(n_keys) <= N_KEYS[1]
    problems = [one for machine in MACHINES for one in machine.problems]
    assert max(one.message_bytes for one in problems) == 4 << 30
    assert {2, 7, 11} <= {len(one.candidates) for one in problems}
    n_ranks = {one.key.communicator.n_ranks for one in problems}
    assert 2 <= min(n_ranks) < 8
    assert 1000 < max(n_ranks) <= 2048
    for machine in MACHINES:
        assert len({one.key for one in machine.problems}) == len(machine.problems)
        assert all(one.key.size_class == size_class(one.message_bytes) for one in machine.problems)


def test_a_seed_is_a_machine() -> None:
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_another_job_changes_the_order_of_settings_and_a_namesake_is_another_machine() -> None:
    def best(problems: list[Problem]) -> list[int]:
        return [int(np.argmin(one.truth_us)) for one in problems]

    pairs = [(best(one.problems), best(one.busy), best(one.namesake)) for one in MACHINES]
    usual, busy, namesake = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    assert 0.1 < np.mean(usual != busy) < np.mean(usual != namesake)
    assert [one.key for one in MACHINES[0].busy] == [one.key for one in MACHINES[0].problems]


def test_where_nothing_is_to_be_gained_catastrophes_stay() -> None:
    for machine in MACHINES:
        before, after = (statistics_of(one) for one in (machine.problems, machine.with_nothing_to_gain()))
        assert after["gain_largest"] == 0.0
        assert after["slow10"] == before["slow10"]


def test_single_calls_stand_out_of_the_noise() -> None:
    noise = with_tails(np.random.default_rng(0), (100, 2000))
    assert np.std(noise) == pytest.approx(1.0, abs=0.1)
    assert 0.0005 < np.mean(np.abs(noise) > 6.0) < 0.01


def test_a_job_saves_what_its_settings_save_and_reaches_it_if_it_stays() -> None:
    arms = np.zeros((2, JUDGED_CALLS), np.int64)
    assert played(PROBLEMS, arms) == Played(0.0, False)
    arms[0, 100:] = 1
    assert played(PROBLEMS, arms) == Played(pytest.approx(0.025), True)
    arms[1, :2] = 2
    assert played(PROBLEMS, arms).saved == pytest.approx(0.025 - 2 * 8.1 / JUDGED_CALLS)


def test_keys_count_as_looked_at_once_anything_else_ran_early_enough() -> None:
    arms = np.zeros((2, LOOKED_AT_WITHIN + 10), np.int64)
    arms[1, 3] = 1  # nothing is to be gained there
    assert never_looked_at(PROBLEMS, arms) == (1, 1)
    arms[0, LOOKED_AT_WITHIN] = 1
    assert never_looked_at(PROBLEMS, arms) == (1, 1)
    arms[0, LOOKED_AT_WITHIN - 1] = 2
    assert never_looked_at(PROBLEMS, arms) == (1, 0)


def one_judged(cold: Played, warm: Played, thompson: float, *, gain: float = 0.3, loss: float = 0.0) -> Judged:
    jobs = {COLD: [cold], LONG: [cold], LATER: [warm], "warm_congestion": [warm]}
    peers = {"thompson": [Played(thompson, True)], "thompson_bounded": [Played(thompson / 2.0, True)]}
    return Judged(gain, {**jobs, **peers}, {COLD: loss, LONG: loss / 10.0, "thompson": 0.1}, 2, 1)


def test_figures_of_all_machines() -> None:
    machines = [
        one_judged(Played(0.10, True), Played(0.20, True), 0.08, loss=0.002),
        one_judged(Played(0.20, False), Played(0.10, False), 0.12),
        one_judged(Played(0.0, False), Played(0.0, False), -0.02, gain=0.01, loss=0.004),
    ]
    found = figures(*together(machines))
    assert found["machines_with_gain"] == 2
    assert [found[f"reached_95_share_{name}"] for name in (COLD, LATER, LONG)] == [0.5, 0.5, 0.5]
    assert found["net_time_saved_ratio_thompson"] == pytest.approx(0.3 / 0.18)
    assert found["net_time_saved@thompson"] == pytest.approx(6.0)
    assert found["loss_where_nccl_is_best_worst_200"] == pytest.approx(0.4)
    assert found["loss_where_nccl_is_best_worst_2000"] == pytest.approx(0.04)
    assert found["warm_minus_cold_worst"] == pytest.approx(30.0 * 0.1)
    assert found["keys_never_looked_at"] == 3


def test_jobs_of_a_kind_are_compared_by_their_means() -> None:
    jobs = {COLD: [Played(0.1, True), Played(0.3, True)], LATER: [Played(0.19, True)]}
    assert warm_minus_cold(Judged(0.3, jobs, {}), LATER) == pytest.approx(30.0 * 0.01)


def test_the_gap_is_that_of_shares_and_as_sure_as_machines_are_many() -> None:
    yes, no = (one_judged(Played(0.1, reached), Played(0.1, reached), 0.1) for reached in (True, False))
    found = figures(*sealed_gap([yes] * 3 + [no], [yes, no, no, no]))
    assert found["sealed_gap"] == pytest.approx(0.5)
    assert found["sealed_gap_standard_error"] == pytest.approx(math.sqrt(2 * 0.25 * 0.75 / 4))


def test_sealed_seeds_are_no_ones_else() -> None:
    assert SEALED_FAMILY_SEEDS.start > 720_000 + 1000
    assert len(SEALED_FAMILY_SEEDS) == 1000


def test_warned_by_a_neighbour_the_bounded_peer_does_not_look() -> None:
    near, far = problem(13, 10.0, 5.0, 100.0), problem(20, 10.0, 5.0, 100.0)
    problems = [problem(12, 10.0, 5.0, 100.0), near, far]
    peer = BoundedThompson(problems, np.random.default_rng(0))
    for arm, us in (0, 10.0), (2, 100.0):
        peer.learn(0, arm, us)
    tried: list[set[int]] = [set(), set()]
    for _ in range(20):
        for at, key in enumerate((1, 2)):
            arm = peer.choose(key)
            tried[at].add(arm)
            peer.learn(key, arm, problems[key].truth_us[arm])
    assert tried == [{0, 1}, {0, 1, 2}]


def test_what_is_told_late_is_not_asked_for_again() -> None:
    peer = Later(Thompson(PROBLEMS[:1], np.random.default_rng(0)), 2)
    arms = []
    for _ in range(6):
        arms.append(peer.choose(0))
        peer.learn(0, arms[-1], PROBLEMS[0].truth_us[arms[-1]])
        peer.end_of_step()
    assert arms[:3] == [0, 1, 2]
    assert arms[-1] == 1


def test_a_machine_is_judged_by_jobs_after_each_past() -> None:
    data = DataSet("two_keys", PROBLEMS, {})
    found = judged(recorded_machine(data), is_long=False, is_quick=True)
    assert found.gain == pytest.approx(0.05)
    assert {name for name in found.jobs if name.startswith(LATER)} == {LATER, "warm_found_nothing"}
    assert found.jobs["nccl_default"] == [Played(0.0, False)] * 2
    drawn = judged(min(MACHINES, key=lambda one: len(one.problems)), is_long=False, is_quick=True)
    assert {"warm_other_machine", "warm_congestion"} <= {*drawn.jobs}
    assert all(job.saved <= drawn.gain + 1e-9 for jobs in drawn.jobs.values() for job in jobs)
    assert all(loss >= 0.0 for loss in drawn.loss_where_nccl_is_best.values())
