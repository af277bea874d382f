"""What calls and channels cost training is learned from steps whose plans differ."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.tuner.learning.policy.step_effects import (
    EXPOSURE,
    OWN_TOLL,
    SHARED_TOLL,
    Load,
    TrainingModel,
)

STEP_US = 10_000.0
loads_of = st.dictionaries(
    st.sampled_from(["forward", "backward", "scatter"]),
    st.builds(Load, st.floats(-0.5 * STEP_US, 0.5 * STEP_US), st.floats(-8 * STEP_US, 8 * STEP_US)),
    min_size=1,
)


@given(st.lists(st.tuples(loads_of, st.floats(0.5, 2.0)), max_size=20), loads_of)
def test_steps_only_ever_take_doubt_away(steps: list[tuple[dict[str, Load], float]], asked: dict[str, Load]) -> None:
    model = TrainingModel()
    before = model.expected(asked, STEP_US, 0.3)[1]
    for loads, times in steps:
        model.step(times * STEP_US, loads, 0.3, 0.01)
        mean, after = model.expected(asked, STEP_US, 0.3)
        assert math.isfinite(mean)
        assert after <= before * (1 + 1e-6) + 1e-9
        before = after


def test_before_any_step_the_exposure_of_all_is_everybodys() -> None:
    model = TrainingModel()
    mean, doubt = model.expected({"forward": Load(0.1 * STEP_US)}, STEP_US, 0.3)
    assert mean == pytest.approx(-math.log1p(0.03))
    assert doubt == pytest.approx(0.1 * EXPOSURE)
    mean, doubt = model.expected({"forward": Load(0.0, STEP_US)}, STEP_US, 0.3)
    assert (mean, doubt) == (0.0, pytest.approx(math.hypot(SHARED_TOLL, OWN_TOLL)))


def _learned(times_of: dict[str, tuple[float, float]], true: dict[str, tuple[float, float]]) -> TrainingModel:
    """Each group's plan changes every few steps; steps take what its exposure and toll make of that."""
    model, rng = TrainingModel(), np.random.default_rng(0)
    for at in range(200):
        loads = {name: Load(*(STEP_US * one * (rng.random() < 0.5) for one in times_of[name])) for name in times_of}
        log_us = math.log(STEP_US) + 0.02 * at / 200 + rng.normal(0.0, 0.005)
        for name, load in loads.items():
            exposure, toll = true[name]
            log_us += (exposure * load.calls_us + toll * load.held_us) / STEP_US
        model.step(math.exp(log_us), loads, 0.3, 0.005)
    return model


def test_exposure_and_toll_of_groups_are_told_apart() -> None:
    true = {"forward": (1.0, 0.0), "scatter": (0.0, 0.01)}
    model = _learned({"forward": (0.05, 2.0), "scatter": (0.05, 6.0)}, true)
    more = Load(0.05 * STEP_US, 0.0), Load(0.0, 6.0 * STEP_US)
    forward, scatter = ([model.expected({name: load}, STEP_US, 0.3)[0] for load in more] for name in true)
    assert forward[0] < -0.025
    assert scatter[1] < -0.04
    assert scatter[1] < forward[1] - 0.02
    exposure, toll, doubt = model.of_group("scatter", 0.3)
    assert exposure < 0.3
    assert toll == pytest.approx(0.01, abs=0.004)
    assert doubt < 0.5 * math.hypot(SHARED_TOLL, OWN_TOLL)


def test_where_one_group_is_waited_for_the_others_are_less() -> None:
    known, told = TrainingModel(), TrainingModel()
    told.know_groups({"forward": 0.1, "backward": 0.1})
    for model in (known, told):
        rng = np.random.default_rng(1)
        for at in range(60):
            more = 0.05 * (at % 2)
            model.step(STEP_US * math.exp(more + rng.normal(0.0, 0.002)), {"forward": Load(more * STEP_US)}, 0.5, 0.002)
    backward = {"backward": Load(0.05 * STEP_US)}
    assert told.expected(backward, STEP_US, 0.5)[0] > known.expected(backward, STEP_US, 0.5)[0] + 0.005
