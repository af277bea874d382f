"""What is said of a gain holds in jobs whose gain is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.reporting import Result
from benchmarks.policy.gain_interval import figures, job
from zerotune.store.records import StepRecord
from zerotune.store.step_times import SideBySide
from zerotune.tuner.learning.policy.control import ControlWindows


def test_intervals_hold_and_nothing_is_claimed_for_nothing() -> None:
    found: dict[str, Result] = {one.metric: one for one in figures([job(seed) for seed in range(5000, 5200)])}
    assert found["gain_interval_coverage"].value >= 0.93
    assert found["gain_claimed_where_none"].value <= 0.02, "one of 66"
    assert found["loss_claimed_where_none"].value <= 0.02
    assert found["first_figure_steps"].value <= 100
    assert found["control_cost_share"].value <= 0.001
    assert found["gain_of_5_percent_seen"].value > 0.7, "else it would be enough to say nothing"


@pytest.mark.parametrize("n_controls", [2, 40])
def test_four_steps_of_plain_noise_tell_as_little_as_they_know(n_controls: int) -> None:
    """Where windows are few, or scatter, the interval is wide."""
    chance, told = np.random.default_rng(0), SideBySide()
    for step in range(12 * n_controls + 12):
        us = 1000.0 * float(np.exp(chance.normal(0.0, 0.05)))
        told.add(StepRecord(step, 1, us), is_control=step % 12 in (4, 5))
    saved = told.saved()
    assert (saved is None) == (n_controls < 4)
    assert saved is None or saved.low_share < 0.0 < saved.high_share


@pytest.mark.parametrize("period", [10, 20, 50, 100])
def test_windows_do_not_meet_what_comes_at_regular_intervals(period: int) -> None:
    """Neither the first ones, nor those that come as soon as they are paid for."""
    windows, met = ControlWindows(0.001), []
    for step in range(100_000):
        if windows.is_due(step):
            windows.begun(step, 0.05)
            met.append(step % period)
    shares = np.bincount(met, minlength=period)[:period] / len(met)
    assert shares.max() < 3.0 / period + 0.03
