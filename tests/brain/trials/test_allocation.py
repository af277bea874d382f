"""Trials and leads run in the share of windows that they are given."""

from __future__ import annotations

import pytest

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
from zerotune.tuner.learning.policy.keys import INCUMBENT_EVERY, VERIFYING_WINDOWS, KeyState
from zerotune.tuner.learning.policy.overrides import Override, Setting, Window, what_runs

N_WINDOWS = 60
TRIAL, LEAD = (Candidate(one, Protocol.simple, 4) for one in (Algorithm.ring, Algorithm.tree))


def _key(index: int = 0, *, trial: bool = False, provisional: bool = False, is_proven: bool = False) -> KeyState:
    key = DecisionKey(CommunicatorClass(8, 1), Collective.all_gather, Phase.other, size_class(1 << 20))
    state = KeyState(index, key, 1 << 20)
    state.trial = TRIAL if trial else None
    if provisional:
        state.provisional, state.provisional_is_proven = LEAD, is_proven
    return state


def _ran(state: KeyState, *, is_overspent: bool = False, provisionals_rest: bool | None = None) -> list[Candidate]:
    found = []
    for _ in range(N_WINDOWS):
        state.begin_window(provisionals_rest=provisionals_rest)
        found.append(what_runs(state, Window(is_overspent=is_overspent)).candidate)
    return found


@pytest.mark.parametrize("index", [0, 70])
def test_a_trial_runs_at_once_and_takes_turns_with_what_usually_runs(index: int) -> None:
    assert _ran(_key(index, trial=True)) == [TRIAL, BASELINE] * (N_WINDOWS // 2)


def test_a_lead_runs_where_no_trial_does() -> None:
    state = _key(trial=True, provisional=True)
    ran = _ran(state)
    assert ran.count(TRIAL) == pytest.approx(N_WINDOWS / 2, abs=1)
    assert ran.count(LEAD) == pytest.approx((1 - 1 / INCUMBENT_EVERY) * N_WINDOWS / 2, abs=1)
    state.trial = state.provisional = None
    assert set(_ran(state)) == {BASELINE}


def test_while_steps_are_compared_leads_run_in_all_windows_or_in_none() -> None:
    assert set(_ran(_key(provisional=True), provisionals_rest=False)) == {LEAD}
    assert set(_ran(_key(provisional=True, is_proven=True), provisionals_rest=True)) == {BASELINE}


def test_an_overdrawn_budget_pauses_all_but_what_earlier_jobs_proved() -> None:
    assert set(_ran(_key(provisional=True), is_overspent=True)) == {BASELINE}
    assert set(_ran(_key(trial=True), is_overspent=True)) == {BASELINE}
    assert set(_ran(_key(provisional=True, is_proven=True), is_overspent=True)) == {BASELINE, LEAD}


def test_what_earlier_jobs_proved_is_verified_at_once() -> None:
    ran = _ran(_key(provisional=True, is_proven=True))
    assert ran[:VERIFYING_WINDOWS].count(LEAD) == VERIFYING_WINDOWS // 2
    assert ran[VERIFYING_WINDOWS:].count(LEAD) >= (1 - 1 / INCUMBENT_EVERY) * (N_WINDOWS - VERIFYING_WINDOWS) - 1


@pytest.mark.parametrize("forced", [Setting(LEAD, Override.experiment), Setting(BASELINE, Override.pause)])
def test_an_experiment_goes_before_a_trial_and_a_trial_before_a_lead(forced: Setting) -> None:
    state = _key(trial=True, provisional=True)
    state.begin_window()
    assert what_runs(state, Window()) == (TRIAL, Override.trial)
    assert what_runs(state, Window(unmeasured={0})) == (TRIAL, Override.first_look)
    assert what_runs(state, Window({0: forced})) == forced
    state.begin_window()
    assert what_runs(state, Window()) == (LEAD, Override.provisional)
    state.provisional_is_proven = True
    assert what_runs(state, Window(is_overspent=True)) == (LEAD, Override.proven)
