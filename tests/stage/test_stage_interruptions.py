"""Checkpoints and evaluation between steps are no part of training, and do not change what is shown of it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.fingerprint.corpus.dataset import SETTLED_STEP, Sequence, recorded
from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint import StageFingerprint
from zerotune.tuner.fingerprint.steps.anatomy import Ints, encode

AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
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
