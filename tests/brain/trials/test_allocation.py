"""Trials and leads run in the share of windows that they are given."""

from __future__ import annotations

import pytest

from zerotune.tuner.learning.policy.acquisition import TRIAL_STEPS
from zerotune.tuner.learning.policy.choice import INCUMBENT_EVERY, Allocation

N_WINDOWS = 60


@pytest.fixture
def turns() -> Allocation:
    made = Allocation()
    made.make_room(3)
    return made


@pytest.mark.parametrize("index", [0, 70])
def test_a_trial_takes_turns_with_what_usually_runs(index: int) -> None:
    turns = Allocation()
    turns.make_room(index + 1)
    turns.begin_trial(index)
    ran = []
    for _ in range(N_WINDOWS):
        turns.take(is_overspent=False)
        ran.append(turns.runs_trial[index])
    assert ran == [True, False] * (N_WINDOWS // 2)


def test_what_is_untried_runs_at_once(turns: Allocation) -> None:
    turns.begin_trial(1)
    turns.take(is_overspent=False)
    assert turns.runs_trial[1]
    assert turns.explored()[:3].tolist() == [False, True, False]
    assert not turns.verified().any()


def test_a_lead_runs_where_no_trial_does(turns: Allocation) -> None:
    turns.begin_lead(0, is_proven=False)
    turns.begin_trial(0)
    n_leads = n_trials = 0
    for _ in range(N_WINDOWS):
        turns.take(is_overspent=False)
        assert not (turns.runs_trial[0] and turns.runs_lead[0])
        n_trials += turns.runs_trial[0]
        n_leads += turns.runs_lead[0]
    assert n_trials == pytest.approx(N_WINDOWS / 2, abs=1)
    assert n_leads == pytest.approx((1 - 1 / INCUMBENT_EVERY) * N_WINDOWS / 2, abs=1)
    turns.has_trial[0] = turns.has_lead[0] = False
    turns.take(is_overspent=False)
    assert not turns.runs_trial[0]
    assert not turns.runs_lead[0]


def test_while_steps_are_compared_leads_run_in_all_windows_or_in_none(turns: Allocation) -> None:
    turns.begin_lead(1, is_proven=False)
    turns.begin_lead(2, is_proven=True)
    for _ in range(N_WINDOWS):
        turns.take(is_overspent=False, leads_rest_at={2})
        assert turns.runs_lead[1]
        assert not turns.runs_lead[2]


def test_an_overdrawn_budget_pauses_all_but_what_earlier_jobs_proved(turns: Allocation) -> None:
    turns.begin_lead(0, is_proven=False)
    turns.begin_trial(1)
    turns.begin_lead(2, is_proven=True)
    n_proven = 0
    for _ in range(N_WINDOWS):
        turns.take(is_overspent=True)
        assert not turns.runs_lead[0]
        assert not turns.runs_trial[1]
        assert turns.verified()[:3].tolist() == [False, False, True]
        n_proven += turns.runs_lead[2]
    assert 0 < n_proven < N_WINDOWS


def test_what_earlier_jobs_proved_is_verified_at_once(turns: Allocation) -> None:
    turns.begin_lead(0, is_proven=True)
    ran = []
    for _ in range(N_WINDOWS):
        turns.take(is_overspent=False)
        ran.append(turns.runs_lead[0])
        assert not turns.explored().any()
    assert sum(ran[:TRIAL_STEPS]) == TRIAL_STEPS // 2
    assert sum(ran[TRIAL_STEPS:]) >= (1 - 1 / INCUMBENT_EVERY) * (N_WINDOWS - TRIAL_STEPS) - 1
