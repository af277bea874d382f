"""What is said of a gain holds in jobs whose gain is known."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.store.records import StepRecord
from zerotune.store.step_times import SideBySide


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
