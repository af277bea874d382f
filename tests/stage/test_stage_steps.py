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
MICRO = [1, 2, 2, 3, 3, 2]


@pytest.mark.parametrize("offset", range(len(STEP)))
def test_a_step_is_known_after_two_of_them_from_anywhere(offset: int) -> None:
    codes = (STEP * 4)[offset : offset + 2 * len(STEP)]
    assert find_period(np.array(codes))[:2] == (len(STEP), len(codes))
    assert find_period(np.array(codes[:-1]))[0] != len(STEP)


def test_many_micro_steps_give_way_as_soon_as_two_steps_are_complete() -> None:
    step = MICRO * 20 + [9]
    cutter = StepCutter()
    found_at = feed(cutter, (step * 3)[3 : 2 * len(step) + 20], block=1)
    assert cutter.period == len(step)
    assert 2 * len(step) <= found_at <= 2.1 * len(step)


def test_a_call_lost_or_exchanged_disturbs_nothing_lasting() -> None:
    cutter = StepCutter()
    feed(cutter, STEP * 3)
    lost, exchanged = STEP[1:], [*STEP[:3], STEP[4], STEP[3], *STEP[5:]]
    for odd in (lost, exchanged):
        assert feed(cutter, odd + STEP * 4) == 0
        assert cutter.period == len(STEP)


def test_calls_count_while_they_repeat() -> None:
    cutter = StepCutter()
    feed(cutter, STEP * 2, block=len(STEP))
    before = cutter.n_alike
    feed(cutter, STEP * 5, block=3)
    assert cutter.n_alike - before == 5 * len(STEP)


@pytest.mark.parametrize("other", [[6, 7, 8, 8], [1, 2, 2, 3], STEP * 2 + [9], [2] * 5 + [1]])
def test_a_change_is_found_within_two_new_steps(other: list[int]) -> None:
    cutter = StepCutter()
    feed(cutter, STEP * 4)
    n_allowed = 2 * len(other) + (2 * len(STEP) if set(other) <= set(STEP) else 0) + 7
    found_at = feed(cutter, other * (n_allowed // len(other) + 2))
    assert cutter.period == len(other)
    assert found_at <= n_allowed


def test_history_is_bounded_and_long_jobs_keep_their_step() -> None:
    cutter = StepCutter()
    step = list(range(1, 1000))
    assert feed(cutter, step * 40, block=777) > 0
    assert cutter.period == len(step)
    assert len(cutter.codes) <= 2 * MAX_CALLS
    assert feed(cutter, step * 20, block=MAX_CALLS + 5) == 0


def test_without_repetition_there_is_no_step() -> None:
    cutter = StepCutter()
    assert feed(cutter, np.random.default_rng(0).integers(0, 1 << 40, 3000).tolist(), block=50) == 0
    assert cutter.period == 0


def test_a_step_is_over_when_others_calls_come_and_back_when_its_own_do() -> None:
    cutter = StepCutter()
    feed(cutter, STEP * 5)
    feed(cutter, list(range(100, 130)))
    assert cutter.is_over
    feed(cutter, STEP * 3)
    assert not cutter.is_over
    assert cutter.period == len(STEP)
