"""If records are lost, no two rounds are equal, and several of them say what the step is."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fingerprint.corpus.dataset import disturbed, recorded
from benchmarks.fingerprint.evaluation import recognised
from zerotune.tuner.fingerprint.encoding.weights import default_encoder
from zerotune.tuner.fingerprint.steps.alignment import Ints, find_consensus
from zerotune.tuner.fingerprint.steps.cutting import StepCutter

STEP = np.array([1, *range(10, 70), *[2] * 20, *range(10, 70), 3, *[4, 5] * 15], np.int64)


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


@pytest.mark.parametrize("rate", [0.002, 0.01])
def test_the_majority_of_aligned_rounds_is_the_step(rate: float) -> None:
    for seed in range(4):
        found = find_consensus(lossy(STEP, 20, seed, rate))
        assert found is not None
        assert rotated(found.step) == rotated(STEP)


def test_steps_that_differ_by_turns_are_one_step_of_two() -> None:
    found = find_consensus(lossy(np.concatenate([STEP, STEP[:90], STEP[100:]]), 6, 7, 0.002))
    assert found is not None
    assert len(found.step) == 2 * len(STEP) - 10


@pytest.mark.parametrize("block", [1, 50, 1000])
def test_a_step_is_known_although_calls_get_lost_all_the_time(block: int) -> None:
    cutter = StepCutter()
    assert feed(cutter, lossy(STEP, 20, 1), block)[-1] == rotated(STEP)
    assert feed(cutter, lossy(STEP, 60, 2), block) == [], "what is known stays"
    assert not cutter.is_over


def test_when_nothing_is_lost_any_more_steps_are_compared_again() -> None:
    cutter = StepCutter()
    feed(cutter, lossy(STEP, 8, 3))
    feed(cutter, np.tile(STEP, 20))
    before = cutter.n_alike
    feed(cutter, np.tile(STEP, 10))
    assert cutter.n_alike - before == 10 * len(STEP)


def test_another_step_is_noticed_where_calls_get_lost() -> None:
    cutter = StepCutter()
    feed(cutter, lossy(STEP, 10, 4))
    other = np.concatenate([STEP[:100], STEP[130:]])
    assert feed(cutter, lossy(other, 24, 5))[-1] == rotated(other)
    unlike = STEP + 1000
    assert feed(cutter, lossy(unlike, 6, 6))[-1] == rotated(unlike)


@pytest.mark.slow
def test_recorded_frameworks_are_recognised_although_calls_get_lost() -> None:
    """One of a hundred, lost or exchanged with its neighbour; read after six steps."""
    lstm = default_encoder()
    accuracy = recognised(lstm, recorded()[::3], 13, rate=0.01, n_steps=6)
    assert accuracy.stage_percent >= 95.0, accuracy.mistakes
    assert accuracy.percent >= 93.0, accuracy.mistakes
