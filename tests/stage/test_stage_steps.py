"""Steps are found by their repetition, wherever one begins to listen."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.tuner.fingerprint.steps.cutting import MAX_CALLS, StepCutter, find_period


def feed(cutter: StepCutter, codes: list[int], block: int = 7) -> int:
    """Calls until the last new step was found; 0 = none was."""
    found_at = 0
    for start in range(0, len(codes), block):
        part = np.array(codes[start : start + block], np.int64)
        if cutter.add(part, np.zeros(len(part))):
            found_at = start + len(part)
    return found_at


STEP = [1, 2, 2, 3, 4, 4, 4, 5]


@pytest.mark.parametrize("offset", range(len(STEP)))
def test_a_step_is_known_after_two_of_them_from_anywhere(offset: int) -> None:
    codes = (STEP * 4)[offset : offset + 2 * len(STEP)]
    assert find_period(np.array(codes))[:2] == (len(STEP), len(codes))
    assert find_period(np.array(codes[:-1]))[0] != len(STEP)


def test_a_call_lost_or_exchanged_disturbs_nothing_lasting() -> None:
    cutter = StepCutter()
    feed(cutter, STEP * 3)
    lost, exchanged = STEP[1:], [*STEP[:3], STEP[4], STEP[3], *STEP[5:]]
    for odd in (lost, exchanged):
        assert feed(cutter, odd + STEP * 4) == 0
        assert cutter.period == len(STEP)


def test_history_is_bounded_and_long_jobs_keep_their_step() -> None:
    cutter = StepCutter()
    step = list(range(1, 1000))
    assert feed(cutter, step * 40, block=777) > 0
    assert cutter.period == len(step)
    assert len(cutter.codes) <= 2 * MAX_CALLS
    assert feed(cutter, step * 20, block=MAX_CALLS + 5) == 0
