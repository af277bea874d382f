"""Where records are lost, no two rounds are the same, and several of them say what the step is."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.tuner.fingerprint.corpus.dataset import disturbed, recorded
from zerotune.tuner.fingerprint.encoding.encoders import encoder_from_bytes
from zerotune.tuner.fingerprint.encoding.weights import shipped_blob
from zerotune.tuner.fingerprint.steps.cutting import StepCutter
from zerotune.tuner.fingerprint.steps.voting import Ints, find_step, voted, walk
from zerotune.tuner.fingerprint.training.evaluation import recognised
from zerotune.tuner.fingerprint.training.held_out import total

STEP = np.array([1, *range(10, 70), *[2] * 20, *range(10, 70), 3, *[4, 5] * 15], np.int64)
MICRO = np.array([7, 8, 8, 9, 7, 6, 6, 6, 5, 4], np.int64)


def lossy(step: Ints, n_steps: int, seed: int, rate: float = 0.01) -> Ints:
    codes = np.tile(step, n_steps)
    return disturbed(codes, np.zeros(len(codes)), np.random.default_rng(seed), rate)[0]


def rotated(step: Ints) -> list[int]:
    """The same for all rotations."""
    return min(np.roll(step, -at).tolist() for at in range(len(step)))


def feed(cutter: StepCutter, codes: Ints, block: int = 50) -> list[list[int]]:
    """The steps found, in order."""
    found = []
    for start in range(0, len(codes), block):
        part = codes[start : start + block]
        if cutter.add(part, np.zeros(len(part))):
            found.append(rotated(cutter.window[0]))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_what_each_round_lacks_the_others_have(seed: int) -> None:
    codes = lossy(STEP, 7, seed)
    found = find_step(codes)
    assert found is not None
    assert rotated(found.step) == rotated(STEP)
    assert found.n_explained >= 0.95 * len(codes)
    assert found.n_breaks > 0


def test_a_walk_goes_back_to_where_the_step_explains_no_more() -> None:
    other = np.arange(1000, 1300)
    codes = np.concatenate([other, STEP, STEP[:40], STEP[41:], STEP])
    walked = walk(codes, STEP)
    assert walked.n_explained == len(codes) - len(other)
    assert (walked.n_odd, walked.n_breaks) == (1, 1)
    assert walked.n_seen.tolist() == [3] * len(STEP)
    assert np.flatnonzero(walked.n_kept < 3).tolist() == [40]
    assert voted(STEP, walked).tolist() == STEP.tolist()


def test_what_one_window_lacks_is_put_back() -> None:
    codes = np.concatenate([np.tile(STEP, 4), STEP[:30], STEP[33:]])
    lacking = codes[-len(STEP) + 3 :]
    assert voted(lacking, walk(codes, lacking)).tolist() == STEP.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_again_is_part_of_the_step(seed: int) -> None:
    """A mark after several micro-steps is nothing that was lost from most of them."""
    whole = np.concatenate([np.tile(MICRO, 4), [99]])
    found = find_step(lossy(whole, 12, seed))
    assert found is not None
    assert rotated(found.step) == rotated(whole)


def test_nothing_is_found_where_nothing_repeats() -> None:
    assert find_step(np.random.default_rng(0).integers(0, 1 << 40, 3000)) is None
    assert find_step(np.zeros(0, np.int64)) is None
    assert find_step(np.arange(10)) is None


@pytest.mark.parametrize("block", [1, 50, 1000])
def test_a_step_is_known_although_calls_get_lost_all_the_time(block: int) -> None:
    cutter = StepCutter()
    assert feed(cutter, lossy(STEP, 20, 1), block)[-1] == rotated(STEP)
    assert feed(cutter, lossy(STEP, 60, 2), block) == [], "what is known stays"
    assert not cutter.is_over


def test_a_long_step_is_kept_for_long() -> None:
    """The history holds fewer rounds of it than there are between two votes of a short one."""
    long = np.concatenate([np.arange(100, 700), [1] * 50, np.arange(100, 700)])
    cutter = StepCutter()
    feed(cutter, lossy(long, 12, 1), 500)
    feed(cutter, lossy(long, 30, 2), 5000)
    assert not cutter.is_over
    assert rotated(cutter.window[0]) == rotated(long)


def test_when_nothing_is_lost_any_more_steps_are_compared_again() -> None:
    cutter = StepCutter()
    feed(cutter, lossy(STEP, 8, 3))
    feed(cutter, np.tile(STEP, 20))
    before = cutter.n_steps
    feed(cutter, np.tile(STEP, 10))
    assert cutter.n_steps - before == 10


def test_another_step_is_noticed_where_calls_get_lost() -> None:
    cutter = StepCutter()
    feed(cutter, lossy(STEP, 10, 4))
    other = np.concatenate([STEP[:100], STEP[130:]])
    assert feed(cutter, lossy(other, 24, 5))[-1] == rotated(other)
    unlike = STEP + 1000
    assert feed(cutter, lossy(unlike, 6, 6))[-1] == rotated(unlike)


def test_a_change_where_nothing_is_lost_is_no_loss() -> None:
    """The old step without some calls is a new one, after two of it."""
    cutter = StepCutter()
    feed(cutter, np.tile(STEP, 6))
    other = np.concatenate([STEP[:100], STEP[103:]])
    assert feed(cutter, np.tile(other, 3)[: 2 * len(other) + 8], block=4) == [rotated(other)]


@pytest.mark.slow
def test_recorded_frameworks_are_recognised_although_calls_get_lost() -> None:
    """One of a hundred, lost or exchanged with its neighbour; read after six steps."""
    lstm = encoder_from_bytes(shipped_blob("lstm"))
    accuracy = total(recognised(lstm, recorded()[::3], 13, rate=0.01, n_steps=6))
    assert accuracy.stage_percent >= 95.0, accuracy.mistakes
    assert accuracy.percent >= 93.0, accuracy.mistakes
