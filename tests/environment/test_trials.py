import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lib.data.environment_family import draw
from benchmarks.policy.environment import N_JOBS, ours, play
from zerotune.tuner.environment.candidates import Candidate
from zerotune.tuner.environment.trials import JobResult, Outcome, findings, kept, next_job

A, B, C = candidates = [Candidate(name, "1") for name in ("NCCL_A", "NCCL_B", "NCCL_C")]
HOUR_S = 3600.0


def job(change="", step_us=1000.0, at=0, outcome=Outcome.ended, n_steps=1000, std_log=0.02, started_at_s=None):
    started_at_s = at * HOUR_S if started_at_s is None else started_at_s
    return JobResult(str(change), step_us, std_log, n_steps, started_at_s, outcome)


def failed(change, at=0):
    return job(change, None, at, Outcome.failed, n_steps=0)


def played(ratios, n_jobs=N_JOBS, seed=0, noise=0.003, offered=candidates):
    """The history of jobs that follow the policy."""
    rng = np.random.default_rng(seed)
    history = []
    for at in range(n_jobs):
        change = next_job(history, offered).change
        ratio = math.prod(ratios.get(one, 1.0) for one in change.split())
        history.append(job(change, 1000.0 * ratio * math.exp(noise * rng.normal()), at))
    return history


def test_the_usual_runs_first_and_again_after_two_trials():
    history = played({"NCCL_A=1": 1.01, "NCCL_B=1": 1.01, "NCCL_C=1": 1.01})
    changes = [one.change for one in history]
    assert changes[0] == ""
    assert all("" in changes[at : at + 3] for at in range(len(changes) - 2))


def test_a_gain_is_kept_once_two_jobs_proved_it():
    history = played({"NCCL_A=1": 0.9})
    assert kept(history) == "NCCL_A=1"
    first = next(at for at in range(len(history)) if kept(history[:at]))
    assert sum(one.change == "NCCL_A=1" for one in history[:first]) >= 2
    (found,) = [one for one in findings(history) if one.change == "NCCL_A=1"]
    assert found.is_kept
    assert found.low_share < 0.1 < found.high_share


def test_faster_variables_of_other_nodes_are_tried_first_and_slower_ones_never():
    elsewhere = {"nccl_b=1": (0.5, 0.05), "nccl_c=1": (-0.3, 0.1)}
    history = [job()]
    choice = next_job(history, candidates, elsewhere=elsewhere)
    assert (choice.change, choice.why) == ("NCCL_C=1", "calls were faster with it on other nodes")
    history += [job(C, 950.0, 1), job(C, 950.0, 2), job("", 1000.0, 3)]
    tried = set()
    for at in range(4, 16):
        choice = next_job(history, candidates, elsewhere=elsewhere)
        tried |= set(choice.change.split())
        history.append(job(choice.change, 950.0 if "NCCL_C=1" in choice.change else 1000.0, at))
    assert kept(history) == "NCCL_C=1"
    assert str(B) not in tried


def test_a_book_that_is_wrong_keeps_nothing():
    history = [job()]
    for at in range(1, 16):
        choice = next_job(history, candidates, elsewhere={"nccl_c=1": (-0.3, 0.05)})
        history.append(job(choice.change, 1200.0 if "NCCL_C=1" in choice.change else 1000.0, at))
    assert sum("NCCL_C=1" in one.change for one in history) <= 2
    assert kept(history) == ""


def test_later_trials_start_from_the_kept_variables():
    history = played({"NCCL_A=1": 0.9, "NCCL_B=1": 0.95}, n_jobs=24)
    assert kept(history) == "NCCL_A=1 NCCL_B=1"
    assert all(len(set(one.change.split()) - set(kept(history[:at]).split())) <= 1 for at, one in enumerate(history))


def test_a_slower_variable_is_not_run_again():
    history = played({"NCCL_A=1": 1.1})
    assert [one.change for one in history].count("NCCL_A=1") == 1
    assert findings(history)[0].why == "slower"


def test_another_value_takes_the_place_of_the_one_that_is_kept():
    values = [Candidate("NCCL_A", "1"), Candidate("NCCL_A", "2")]
    history = played({"NCCL_A=1": 0.9, "NCCL_A=2": 0.8}, n_jobs=24, offered=values)
    assert kept(history) == "NCCL_A=2"
    assert all(len(one.change.split()) <= 1 for one in history)


def test_a_failed_job_bans_its_change_for_good():
    history = [job(), failed(A, 1)]
    (found,) = findings(history)
    assert found.is_banned
    assert "failed" in found.why
    assert math.isnan(found.gain_share)
    for at in range(2, 40):
        change = next_job(history, candidates).change
        assert str(A) not in change.split()
        history.append(job(change, 1000.0, at))


def test_a_failure_under_a_kept_variable_drops_it():
    history = [*played({"NCCL_A=1": 0.9}), failed(A, 20)]
    assert kept(history) == ""
    assert next_job(history, [A]).change == ""


def test_a_failure_of_a_trial_bans_the_trial_alone():
    history = [*played({"NCCL_A=1": 0.9}), failed("NCCL_A=1 NCCL_B=1", 20)]
    assert kept(history) == "NCCL_A=1"
    assert [one.change for one in findings(history) if one.is_banned] == ["NCCL_B=1"]


def test_a_failed_usual_job_bans_nothing():
    assert findings([failed("")]) == []
    assert next_job([failed("")], candidates).change == ""


def test_a_change_under_which_jobs_leave_no_time_is_given_up():
    history = [job()]
    for at in range(1, 9):
        change = next_job(history, [A]).change
        history.append(job(change, None, at, Outcome.unknown) if change else job(at=at))
    assert [one.change for one in history].count("NCCL_A=1") == 2
    assert "left no step time" in findings(history)[0].why


def test_a_large_loss_ends_trials():
    history = played({"NCCL_A=1": 4.0, "NCCL_B=1": 4.0, "NCCL_C=1": 4.0}, n_jobs=24)
    assert sum(bool(one.change) for one in history) == 1


def test_without_a_budget_nothing_is_tried():
    assert next_job([job(at=at) for at in range(5)], candidates, loss_share=0.0).change == ""


def test_drift_between_days_is_not_a_gain():
    """The machine becomes faster by a tenth within three weeks, whatever runs."""
    history = []
    for at in range(24):
        change = next_job(history, candidates).change
        history.append(job(change, 1000.0 * math.exp(-0.005 * at), started_at_s=86400.0 * at))
    assert kept(history) == ""


WORTHLESS = [
    job(A, math.nan),
    job(A, math.inf),
    job(A, -5.0),
    job(A, 0.0),
    job(A, 5e-324),
    job(A, 1e308),
    job(A, None),
    job(A, n_steps=0),
    job(A, n_steps=-3),
    job(A, n_steps=10**400),
    job(A, std_log=math.nan),
    job(A, std_log=-1.0),
    job(A, std_log=1e300),
    job(A, outcome=Outcome.unknown),
]


@pytest.mark.parametrize("one", WORTHLESS)
def test_a_job_without_a_time_that_can_be_says_nothing(one):
    (found,) = findings([job(), one])
    assert found.n_jobs == 0
    assert math.isnan(found.gain_share)
    assert kept([job(), one]) == ""
    assert next_job([one], candidates).change == ""


@pytest.mark.parametrize("started_at_s", [math.nan, math.inf, -math.inf, -1e300, 1e300, 0.0])
def test_gaps_and_wrong_clocks_do_no_harm(started_at_s):
    history = [job(), job(A, 900.0, started_at_s=started_at_s), job(at=3), job(A, 900.0, 4)]
    (found,) = findings(history)
    assert math.isfinite(found.gain_share)
    assert found.low_share <= found.gain_share <= found.high_share


numbers = st.one_of(st.none(), st.floats(), st.floats(900.0, 1100.0))
any_job = st.builds(
    JobResult,
    st.sampled_from(["", "NCCL_A=1", "NCCL_B=1", "NCCL_A=1 NCCL_B=1", "NCCL_A=2", "of another list"]),
    numbers,
    st.floats(),
    st.integers(),
    st.floats(),
    st.sampled_from(Outcome),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(any_job, max_size=15))
def test_any_history_gives_one_answer_that_obeys_its_bans(history):
    choice = next_job(history, candidates)
    assert choice == next_job(list(history), candidates)
    assert choice.why
    banned = {one.change for one in findings(history) if one.is_banned}
    assert not banned & set(choice.change.split())
    assert not banned & set(kept(history).split())
    assert len(set(choice.change.split()) - set(kept(history).split())) <= 1
    assert set(choice.change.split()) <= {*map(str, candidates), *kept(history).split()}


def test_nothing_is_kept_where_nothing_is_better():
    machines = [draw(seed).with_all_alike() for seed in range(7000, 7150)]
    changed = [play(one, ours, kept, seed).has_changed for seed, one in enumerate(machines)]
    assert np.mean(changed) <= 0.02


def bold(history, offered):
    """The policy where trials may lose all of the time."""
    return next_job(history, offered, 1.0).change


def test_no_job_is_lost_twice_to_one_change():
    machines = [replace(draw(seed), crashes=(True,) * len(draw(seed).crashes)) for seed in range(7000, 7030)]
    assert all(play(one, bold, kept, 0).lost_jobs == 0 for one in machines)
