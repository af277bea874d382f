"""What scores come to: never what cannot be, and what is counted is not guessed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from store.records import Stage
from tuner.stage.encoders import decide
from tuner.stage.labels import ACCUMULATIONS, N_OUTPUTS, POSSIBLE, STAGES, Shown

SCORES = st.lists(st.floats(-50, 50), min_size=N_OUTPUTS, max_size=N_OUTPUTS).map(np.array)


def scores(stage: float, accumulation: float, tensor: float, partitioned: float, of: Shown) -> np.ndarray:
    result = np.zeros(N_OUTPUTS)
    result[STAGES.index(of.stage)] = stage
    result[len(STAGES) + ACCUMULATIONS.index(of.accumulation)] = accumulation
    result[-2:] = partitioned, tensor
    return result


@given(SCORES, st.integers(0, 8))
def test_only_what_can_be_shown_is(values: np.ndarray, n_micro_steps: int) -> None:
    shown = decide(values, n_micro_steps)
    assert shown in POSSIBLE
    if shown.partitioned_activations and n_micro_steps:
        assert shown.accumulation is not (n_micro_steps == 1)


def test_an_accumulation_that_the_stage_cannot_show_gives_way() -> None:
    """ZeRO-1 or 2 without partitioned activations never shows that it does not accumulate."""
    sure = scores(9.0, 1.0, -5.0, -5.0, Shown(Stage.zero1_or_2, False))
    assert decide(sure) == Shown(Stage.zero1_or_2)


def test_micro_steps_that_were_counted_overrule() -> None:
    for counted, scored in ((1, True), (4, False)):
        values = scores(5.0, 2.0, 5.0, 5.0, Shown(Stage.zero3, scored, True, True))
        assert decide(values) == Shown(Stage.zero3, scored, True, True)
        assert decide(values, counted).accumulation is not scored


def test_what_is_not_probable_enough_is_unknown() -> None:
    assert decide(np.zeros(N_OUTPUTS)).stage is Stage.unknown
