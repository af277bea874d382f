"""Checkpoints and evaluation between steps are no part of training, and do not change what is shown of it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fingerprint.corpus.dataset import SETTLED_STEP, Sequence, recorded
from zerotune.store.records import Collective, Stage, StepRecord
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.steps.anatomy import Ints, encode
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge

AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
ZERO3 = [(AG, 9 << 20), *[(AG, 1 << 20)] * 4, *[(AG, 1 << 20), (RS, 1 << 20)] * 4, (RS, 9 << 20), (AR, 4)]
SAVE = [(AG, 512 * size) for size in (31, 7, 90, 14) for _ in range(12)]
"""Every tensor of the model and of the optimizer, one by one: more calls than a step has."""


def codes(*calls: tuple[Collective, int]) -> Ints:
    return encode(np.array([kind for kind, _ in calls]), np.array([size for _, size in calls]))


def play(fingerprint: StageFingerprint, step: Ints, save: Ints, n_steps: int, every: int) -> list[Stage]:
    """What is shown after each step, of which each `every`th is followed by a checkpoint."""
    shown = []
    for number in range(n_steps):
        for part in (step,) if (number + 1) % every else (step, save):
            fingerprint.add(part & 15, part >> 4, np.zeros(len(part)), number)
            shown.append(fingerprint.stage)
    return shown


@pytest.fixture(scope="module")
def runs() -> list[Sequence]:
    return [run for run in recorded() if run.shown.stage is not Stage.unknown][::9]


@pytest.mark.parametrize("every", [5, 10, 40])
def test_a_save_every_few_steps_leaves_the_stage_as_it_is(runs: list[Sequence], every: int) -> None:
    for run in runs:
        step = run.codes()[run.step(min(SETTLED_STEP, len(run.step_starts) - 1))]
        # An embedding is a unit of its own in ZeRO-3, and the first tensor of a checkpoint: a step gathers as much.
        alike = step[(step & 15) == AG][:1] if run.shown.stage is Stage.zero3 else step[:0]
        save = np.concatenate([alike, codes(*SAVE[:20]), alike, codes(*SAVE[20:]), alike, alike])
        if len(step) and len(np.unique(step)) < len(step):
            shown = play(StageFingerprint(), step, save, 40, every)[12:]
            assert set(shown) == {run.shown.stage}, run.name


def test_other_training_is_noticed_though_it_begins_with_gathers() -> None:
    fingerprint = StageFingerprint()
    play(fingerprint, codes(*ZERO3), codes(*SAVE), 10, 99)
    other = [(AG, 3 << 19), *[(AG, 5 << 18)] * 6, *[(RS, 5 << 18)] * 6, (RS, 3 << 19), (AR, 4)]
    assert play(fingerprint, codes(*other), codes(*SAVE), 3, 99)[-1] is Stage.zero1_or_2


def test_a_jobs_stage_is_the_one_that_holds_most_steps() -> None:
    brain = Brain("job", "f", {}, Knowledge(), BrainSettings(), lambda: 0.0)
    block = np.zeros(64, OBSERVATION_FIELDS)
    for number in range(30):
        kinds = ZERO3 if number < 20 else [(AR, 1 << 10 + number % 7), (AR, 3 << 16), (AR, 1 << 19)]
        rows = block[: len(kinds)]
        rows["collective"], rows["message_bytes"] = [kind for kind, _ in kinds], [size for _, size in kinds]
        rows["step"] = number
        brain.sequence(rows)
        brain.step_finished(StepRecord(number, 0, 1000.0))
    assert brain.stage is Stage.zero3
