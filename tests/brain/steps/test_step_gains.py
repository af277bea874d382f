"""What steps say without being asked, and when it pays to ask them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import Collective, Phase
from zerotune.tuner.learning.policy.steps.step_gains import SIDE_EFFECT, StepGains, steps_worth
from zerotune.tuner.learning.policy.steps.step_trial import (
    AUDIT_EVERY_STEPS,
    CAP_EVERY_STEPS,
    StepTrials,
    Variant,
    VariantResult,
)


def _worth(gain: float, doubt: float, n_steps: int) -> float:
    return steps_worth(gain, doubt, least=0.002, noise=0.01, most_units=24, n_steps=n_steps)


@pytest.mark.parametrize("true_effect", [-0.06, 0.0, 0.04])
def test_a_side_effect_is_seen_in_windows_that_differ(true_effect: float) -> None:
    rng = np.random.default_rng(0)
    gains = StepGains()
    for step in range(80):
        share = 0.5 * (step % 4 > 0)
        drift = 0.02 * step / 80
        gains.step(math.log(1e5) + drift - true_effect * share + rng.normal(0, 0.01), {"gathers": share})
    mean, doubt = gains.side_effect("gathers")
    assert doubt < 0.1 * SIDE_EFFECT
    assert abs(mean - true_effect) < 3 * doubt
    assert gains.noise == pytest.approx(0.01, rel=0.3)


def test_two_groups_are_told_apart_only_where_steps_differ_in_one_alone() -> None:
    rng = np.random.default_rng(1)
    apart, together = StepGains(), StepGains()
    for step in range(120):
        first, second = float(step % 2), float(step // 2 % 2)
        log_us = 10.0 + 0.03 * first - 0.01 * second + rng.normal(0, 0.01)
        apart.step(log_us, {"first": first, "second": second})
        together.step(log_us, {"first": first, "second": first})
    assert apart.side_effect("first")[0] == pytest.approx(-0.03, abs=0.01)
    assert apart.side_effect("second")[0] == pytest.approx(0.01, abs=0.01)
    assert together.side_effect("first")[1] > 2 * apart.side_effect("first")[1]


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=60))
def test_doubt_never_grows_beyond_knowing_nothing(steps: list[tuple[float, float, float]]) -> None:
    gains = StepGains()
    for log_us, first, second in steps:
        gains.step(10.0 + log_us, {"first": first, "second": second})
        gains.changed("first", second)
    for name in ("first", "second", "never seen"):
        mean, doubt = gains.side_effect(name)
        assert math.isfinite(mean)
        assert 0.0 < doubt <= SIDE_EFFECT * (1 + 1e-9)


def test_other_settings_bring_new_doubt() -> None:
    gains = StepGains()
    for step in range(100):
        gains.step(10.0, {"gathers": float(step % 2)})
    before = gains.side_effect("gathers")[1]
    gains.changed("gathers", 0.5)
    assert gains.side_effect("gathers")[1] > 2 * before


def test_what_steps_have_answered_is_not_asked_again() -> None:
    assert _worth(-0.10, 0.005, 10_000) < 0, "steps are shorter by far: going without is dear and tells nothing"
    assert _worth(-0.001, 0.03, 100) > 0, "next to nothing is saved, much may be lost"
    assert _worth(-0.03, 0.015, 50) < 0 < _worth(-0.03, 0.015, 5000), "the longer a job, the more is at stake"


@pytest.mark.parametrize(
    ("variant", "every"),
    [
        (Variant("gathers left to NCCL", {}, None, group="gathers"), AUDIT_EVERY_STEPS),
        (Variant("no cap for gathers", {}, None, lifts_cap=True), AUDIT_EVERY_STEPS),
        (Variant("at most 4 channels", {}, 4), CAP_EVERY_STEPS),
        (Variant("channels by what they cost training", {}, None), CAP_EVERY_STEPS),
    ],
)
def test_variants_come_back_ever_more_rarely(variant: Variant, every: int) -> None:
    trials = StepTrials()
    at, due = 0, []
    for step in range(9 * every):
        if variant in trials.untried([Variant("another", {}, 2), variant], step):
            trials.begin(variant, step)
            due.append(step - at)
            at = step
    assert due == [0, every + 1, 2 * every + 1, 4 * every + 1]


def test_what_was_slower_than_luck_explains_is_not_tried_again_but_audited() -> None:
    cap, audit = Variant("at most 4 channels", {}, 4), Variant("no cap for gathers", {}, None, lifts_cap=True)
    assert VariantResult(cap, False, -0.05, 0.005).is_hopeless
    assert not VariantResult(cap, False, -0.005, 0.005).is_hopeless
    trials = StepTrials()
    for variant in (cap, audit):
        trials.begin(variant, 0)
        trials.end(10, for_good=True)
    assert [*trials.untried([cap, audit], 100_000)] == [audit]
    trials.reset()
    assert [*trials.untried([cap, audit], 100_000)] == [cap, audit]


@pytest.mark.parametrize("compute_us", [2_000.0, 1_000_000.0])
def test_what_steps_show_and_what_hardly_runs_is_never_audited(compute_us: float) -> None:
    place = fabric.load("ethernet_boxes").communicator(range(16))
    calls = [Call(Collective.all_gather, Phase.forward_gather, 1 << exponent) for exponent in (14, 17, 20)] * 4
    world = World("ethernet_boxes", place, calls, compute_us=compute_us)
    brain = make_brain(world)
    audited = 0
    for _ in range(300):
        play(world, brain, 1)
        variant = brain._oversight.variant
        audited += variant is not None and variant.group != ""
    promoted = [state for state in brain._states if not state.incumbent.is_baseline]
    assert promoted
    assert audited == 0
