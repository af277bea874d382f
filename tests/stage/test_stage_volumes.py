"""What volumes prove where they add up to the byte, and that they prove nothing wrong of any run that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from given_steps import step_of

from benchmarks.fingerprint.corpus.dataset import SETTLED_STEP, Sequence, generated, hypothetical, recorded
from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.encoding.encoders import decide
from zerotune.tuner.fingerprint.labels import ACCUMULATIONS, N_OUTPUTS, STAGES, Shown
from zerotune.tuner.fingerprint.steps.anatomy import TINY, Step
from zerotune.tuner.fingerprint.steps.volumes import Proven, proven

AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
FLAG = (AR, 4)
SMALL = (AG, 3 << 10)
"""A tensor that stays whole, gathered once after the step."""
UNITS = [(AG, 7 << 20), (AG, 5 << 20), (AG, 3 << 20), (AG, 2 << 20)]
MODEL = (17 << 20) + (3 << 10)


def guess(stage: Stage, accumulation: bool | None) -> np.ndarray:
    scores = np.zeros(N_OUTPUTS)
    scores[STAGES.index(stage)] = 9.0
    scores[len(STAGES) + ACCUMULATIONS.index(accumulation)] = 9.0
    scores[-2:] = -9.0
    return scores


@pytest.mark.parametrize("n_micro_steps", [1, 3])
@pytest.mark.parametrize("element", [1, 2])
def test_who_gathers_once_is_not_said_to_gather_again(n_micro_steps: int, element: int) -> None:
    step = step_of(*[*UNITS, (RS, element * MODEL)] * n_micro_steps, FLAG, SMALL)
    assert proven(step) == Proven(only_once=True)
    accumulates = n_micro_steps > 1
    assert decide(guess(Stage.zero3, accumulates), step).stage is not Stage.zero3


@pytest.mark.parametrize("element", [1, 2])
def test_who_gathers_again_is_not_said_to_keep(element: int) -> None:
    micro = [*UNITS, *UNITS[2::-1], (RS, element * MODEL)]
    step = step_of(*micro * 2, FLAG, SMALL)
    assert proven(step).again
    scores = guess(Stage.zero2, True)
    scores[STAGES.index(Stage.zero3)] = 5.0
    assert decide(scores, step) == Shown(Stage.zero3, True)


def test_what_does_not_add_up_proves_nothing() -> None:
    step = step_of(*UNITS, *UNITS[::-1], (RS, MODEL + (1 << 16)), FLAG, SMALL)
    assert proven(step) == Proven()
    assert proven(step_of(*UNITS, FLAG)) == proven(step_of((AR, 1 << 20), (AR, 1 << 21))) == Proven()


def is_wrong(found: Proven, run: Sequence) -> list[bool]:
    """For each thing proven, whether the run does just that."""
    training, stage = run.training, run.shown.stage
    passes_first = training.n_micro > 1 and training.gathers_each and not training.sends_each
    gathers_again = stage is Stage.zero3 or (stage is Stage.zero1 and passes_first)
    return [
        found.only_once and gathers_again,
        found.again and stage in (Stage.zero2, Stage.zero1_or_2),
        found.one_pass and passes_first and gathers_again,
        found.several_passes and stage is Stage.zero3 and run.shown.accumulation is False,
    ]


def found_in(runs: Iterable[Sequence]) -> tuple[Counter[str], list[str]]:
    """(how often each thing is proven, the runs of which it is wrong)."""
    n_proven: Counter[str] = Counter()
    wrong = []
    for run in runs:
        codes = run.codes()[run.step(min(SETTLED_STEP, len(run.step_starts) - 1))]
        step = Step(codes, np.zeros(len(codes)))
        if (step.roles == TINY).all():
            continue
        found = proven(step)
        n_proven.update(name for name, value in found._asdict().items() if value)
        if any(is_wrong(found, run)):
            wrong.append(f"{run.name}: {run.shown}, {found}")
    return n_proven, wrong


def test_nothing_wrong_is_proven_of_frameworks() -> None:
    n_proven, wrong = found_in([*recorded(), *generated(8, 8504)])
    assert not wrong
    assert all(n_proven[name] > 10 for name in Proven._fields), n_proven


def test_hardly_anything_wrong_is_proven_of_what_nobody_wrote() -> None:
    """Sums may be equal by chance."""
    n_proven, wrong = found_in(hypothetical(400, 8505))
    assert len(wrong) <= 0.02 * n_proven.total(), wrong
