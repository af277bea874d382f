"""Trials and leads run in the share of windows that they are given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.tuner.learning.policy.turns import LEAD_SHARE, LEAST_SHARE, MOST_SHARE, TRUSTED_SHARE, Turns

N_WINDOWS = 60


@pytest.fixture
def turns() -> Turns:
    made = Turns()
    for index in range(3):
        made.register(index)
    return made


@given(st.floats(0.0, 1.0), st.booleans())
def test_a_trial_gets_its_share_at_any_time(odds: float, is_trusted: bool) -> None:
    turns = Turns()
    turns.register(70)
    turns.begin_trial(70, odds, is_trusted=is_trusted)
    share = min(max(odds, TRUSTED_SHARE if is_trusted else LEAST_SHARE), MOST_SHARE)
    n_runs = 0
    for n_windows in range(1, N_WINDOWS + 1):
        turns.take(is_overdrawn=False)
        n_runs += turns.is_trials(70)
        assert abs(n_runs - share * n_windows) < 1.0 + 1e-6
    assert 0 < n_runs < N_WINDOWS, "the incumbent shows itself, too"


def test_what_is_untried_runs_at_once(turns: Turns) -> None:
    turns.begin_trial(1, 0.0, is_trusted=False)
    assert turns.take(is_overdrawn=False) == {1}
    assert turns.is_trials(1)
    assert turns.explored()[:3].tolist() == [False, True, False]
    assert not turns.verified().any()


def test_a_lead_runs_where_no_trial_does(turns: Turns) -> None:
    turns.begin_lead(0)
    turns.begin_trial(0, 0.5, is_trusted=False)
    n_leads = n_trials = 0
    for _ in range(N_WINDOWS):
        turns.take(is_overdrawn=False)
        assert not (turns.is_trials(0) and turns.is_leads(0))
        n_trials += turns.is_trials(0)
        n_leads += turns.is_leads(0)
    assert n_trials == pytest.approx(N_WINDOWS / 2, abs=1)
    assert n_leads == pytest.approx(LEAD_SHARE * N_WINDOWS / 2, abs=1)
    turns.end_trial(0)
    turns.end_lead(0)
    assert 0 in turns.take(is_overdrawn=False)
    assert not turns.is_trials(0)
    assert not turns.is_leads(0)


def test_while_steps_are_compared_leads_run_in_all_windows_or_in_none(turns: Turns) -> None:
    turns.begin_lead(1)
    turns.begin_lead(2)
    for _ in range(N_WINDOWS):
        turns.take(is_overdrawn=False, leads_rest_at={2})
        assert turns.is_leads(1)
        assert not turns.is_leads(2)


def test_an_overdrawn_budget_pauses_all_but_what_earlier_jobs_proved(turns: Turns) -> None:
    turns.begin_lead(0)
    turns.begin_trial(1, 1.0, is_trusted=False)
    turns.begin_trial(2, 1.0, is_trusted=True)
    turns.take(is_overdrawn=True)
    assert not turns.is_leads(0)
    assert not turns.is_trials(1)
    turns.take(is_overdrawn=True)
    assert turns.is_trials(2)
    assert turns.verified()[:3].tolist() == [False, False, True]


