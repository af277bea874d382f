"""What other settings cost training: exposure and toll by group, and the caps that follow from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lib.brain_world import Call, OverlappedWorld, World, decided, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import Collective, Phase
from zerotune.tuner.learning.policy.evidence.call_savings import CallSavings
from zerotune.tuner.learning.policy.trials.training_cost import EXPOSURE, OWN_TOLL, SHARED_TOLL, Change, TrainingCost

GATHER, SCATTER = Collective.all_gather, Collective.reduce_scatter
shares = st.floats(-0.5, 0.5)
groups = st.dictionaries(
    st.sampled_from(["forward", "backward", "scatter"]),
    st.builds(Change, shares, st.floats(-8, 8)),
    min_size=1,
)


@given(st.lists(st.tuples(groups, st.floats(-0.5, 0.5), st.floats(0.001, 0.1)), max_size=20), groups)
def test_trials_only_ever_take_doubt_away(trials: list, asked: dict[str, Change]) -> None:
    cost = TrainingCost()
    before = cost.expected(asked, 0.3)[1]
    for changes, gain, doubt in trials:
        cost.learn(changes, 0.3, gain, doubt)
        mean, after = cost.expected(asked, 0.3)
        assert math.isfinite(mean)
        assert after <= before * (1 + 1e-6) + 1e-9
        before = after


def test_what_a_trial_showed_is_expected_again_and_of_other_groups_in_part() -> None:
    cost, change = TrainingCost(), Change(0.0, 2.0)
    cost.learn({"scatter": change}, 0.3, 0.04, 0.0005)
    same, doubt = cost.expected({"scatter": change}, 0.3)
    other, wider = cost.expected({"backward": change}, 0.3)
    assert same == pytest.approx(0.04, abs=0.001)
    assert 0.01 < other < same
    assert wider > 5 * doubt
    assert cost.expected({"scatter": Change(0.0, 4.0)}, 0.3)[0] == pytest.approx(0.08, abs=0.002)


def test_before_any_trial_the_exposure_of_all_is_everybodys() -> None:
    cost = TrainingCost()
    mean, doubt = cost.expected({"forward": Change(0.1, 0.0)}, 0.3)
    assert mean == pytest.approx(-math.log1p(0.03))
    assert doubt == pytest.approx(0.1 * EXPOSURE)
    mean, doubt = cost.expected({"forward": Change(0.0, 1.0)}, 0.3)
    assert (mean, doubt) == (0.0, pytest.approx(math.hypot(SHARED_TOLL, OWN_TOLL)))


def test_what_channels_cost_is_known_from_trials_only() -> None:
    cost = TrainingCost()
    assert cost.of_group("scatter", 0.3) is None
    cost.know_groups({"scatter": 0.1})
    assert cost.of_group("scatter", 0.3) is None
    cost.learn({"scatter": Change(0.0, 2.0)}, 0.3, 0.04, 0.0005)
    known = cost.of_group("scatter", 0.3)
    assert known == (pytest.approx(0.3, abs=0.1), pytest.approx(0.02, abs=0.002))
    cost.learn({"scatter": Change(0.0, 2.0)}, 0.3, -0.04, 0.0005)
    assert cost.of_group("scatter", 0.3) is None


def test_where_one_group_is_waited_for_the_others_are_less() -> None:
    cost = TrainingCost()
    cost.know_groups({"forward": 0.1, "backward": 0.1})
    cost.learn({"forward": Change(0.05, 0.0)}, 0.5, -0.05, 0.001)
    forward, backward = (cost.expected({name: Change(0.05, 0.0)}, 0.5)[0] for name in ("forward", "backward"))
    assert forward == pytest.approx(-0.05, abs=0.005)
    assert backward > -0.02 > forward


@pytest.mark.slow
def test_gathers_that_are_waited_for_end_with_other_settings_than_hidden_ones_of_the_same_size() -> None:
    place = fabric.load("few_sms_node").communicator(range(8))
    kinds = [(GATHER, Phase.forward_gather), (GATHER, Phase.post_step_gather), (SCATTER, Phase.gradient_scatter)]
    calls = [Call(kind, phase, 1 << exponent) for exponent in (22, 24, 26) for kind, phase in kinds for _ in range(3)]
    world = OverlappedWorld(
        "few_sms_node", place, calls, compute_us=40_000.0, waited_for=frozenset({Phase.forward_gather})
    )
    brain = make_brain(world)
    play(world, brain, 800)
    chosen = decided(brain)
    for exponent in (24, 26):
        forward, after = (
            world.truth(call, chosen(call))[1].n_channels
            for call in (Call(GATHER, phase, 1 << exponent) for _, phase in kinds[:2])
        )
        assert after <= 16 < forward
    assert brain.spent_percent <= 1.0


def test_where_channels_cost_nothing_and_all_settings_are_alike_no_cap_is_adopted() -> None:
    place = fabric.load("h100_node").communicator(range(8))
    calls = [Call(kind, phase, 1 << 22) for kind, phase in ((GATHER, Phase.forward_gather), (SCATTER, Phase.other))] * 4
    for seed in range(6):
        world = World("h100_node", place, calls, compute_us=5_000.0, seed=seed, flat=True)
        brain = make_brain(world)
        play(world, brain, 200)
        assert all(decided(brain)(call).is_baseline for call in calls)


def test_a_key_that_is_younger_than_what_is_known_of_rates_takes_no_time_yet() -> None:
    place = fabric.load("few_sms_node").communicator(range(8))
    world = World("few_sms_node", place, [Call(GATHER, Phase.forward_gather, 1 << 22)])
    brain = make_brain(world)
    play(world, brain, 3)
    savings = CallSavings()
    savings.refresh([], brain._regimes.evidence, np.zeros(0))
    assert savings.running_us(brain._states, brain._regimes.evidence) == 0.0
    savings.refresh(brain._states, brain._regimes.evidence, np.ones(1))
    assert savings.running_us(brain._states, brain._regimes.evidence) > 0.0
