"""What larger messages than any before run with, when memory became free."""

from __future__ import annotations

import math

import pytest
from brain_world import Call, World, make_brain, play

from store.records import BASELINE, SIZE_CLASSES_PER_OCTAVE, Algorithm, Candidate, Collective, CommunicatorClass, Phase
from tuner.brain import Brain
from tuner.policy import ahead
from tuner.policy.ahead import Span
from tuner.policy.choice import NEVER_STEP

MIB = 1 << 20
NODE = CommunicatorClass(8, 1)


def _reduced(n_bytes: int) -> Call:
    return Call(Collective.all_reduce, Phase.gradient_scatter, n_bytes)


def _freed(n_bytes: int = MIB, fabric: str = "h100_node") -> tuple[World, Brain]:
    """A job that let go of some memory, and has found something faster since."""
    world = World(fabric, NODE, [_reduced(n_bytes)] * 4, memory_pressure=0.97)
    brain = make_brain(world)
    play(world, brain, 20)
    world.memory_pressure = 0.6
    play(world, brain, 100)
    return world, brain


def test_the_first_larger_message_runs_with_what_was_faster_at_smaller_ones() -> None:
    world, brain = _freed()
    found = brain._states[0].usual
    assert found.algorithm is Algorithm.nvls
    larger = _reduced(2 * MIB)
    assert world.chosen(larger) == found
    assert world.truth(larger, found)[0] < 0.8 * world.truth(larger, BASELINE)[0]
    world.calls = [larger] * 4
    play(world, brain, 60)
    assert brain._states[1].incumbent == found


def test_what_is_found_later_is_taken_along_too() -> None:
    world, brain = _freed()
    state = brain._states[0]
    rows = brain._ahead.rows
    brain._policy.set_incumbent(state, BASELINE, "rollback", "")
    state.quiet_until = NEVER_STEP  # nor is it tried again
    brain.propose()
    play(world, brain, 2)
    assert brain._ahead.rows != rows
    assert all(row.candidate.is_baseline for row in brain._ahead.rows)


def test_the_further_away_the_more_must_be_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    _, brain = _freed()
    state, evidence = brain._states[0], brain._regimes.evidence
    spans = [
        Span(first, first + SIZE_CLASSES_PER_OCTAVE - 1)
        for first in (state.key.size_class + 1, state.key.size_class + 1 + SIZE_CLASSES_PER_OCTAVE)
    ]
    near, far = (brain._ahead._promises(state, span, evidence) for span in spans)
    assert 0.55 * far < near
    brain._ahead._min_gain = math.inf  # the model says nothing
    for least, expected in ((0.4 * min(near, far), 2), (0.55 * far, 1), (1.1 * near, 0)):
        monkeypatch.setattr(ahead, "CARRIED_GAIN", least)
        rows = brain._ahead._next_ones([state], brain._states, evidence)
        assert [row.candidate == state.usual for row in rows] == [expected > 0, expected > 1]


def test_what_nccls_costs_say_of_the_two_sizes_is_taken_off() -> None:
    """LL gains at small messages by its latency, and loses at large ones by its bandwidth."""
    _, brain = _freed(256 << 10)
    state, evidence = brain._states[0], brain._regimes.evidence
    state.lead = Candidate(Algorithm.ring, state.default_setting.protocol.ll, 16)
    slots = evidence.find(state.index, BASELINE), evidence.slot(state.index, state.lead)
    evidence.mean[slots[1]] = evidence.log_us(slots[0]) - 0.5
    evidence.n_units[slots[1]] = 8
    near, far = (
        brain._ahead._promises(state, Span(first, first + 3), evidence)
        for first in (state.key.size_class, state.key.size_class + 6 * SIZE_CLASSES_PER_OCTAVE)
    )
    assert near == pytest.approx(0.5, abs=0.1)
    assert far < 0.1


def test_nothing_is_promised_of_what_was_not_measured() -> None:
    _, brain = _freed()
    state, evidence = brain._states[0], brain._regimes.evidence
    span = Span(state.key.size_class + 1, state.key.size_class + 4)
    assert brain._ahead._promises(state, span, evidence) > 0.05
    state.incumbent = Candidate(Algorithm.ring, state.incumbent.protocol, 3)
    assert math.isnan(brain._ahead._promises(state, span, evidence))
    evidence.slot(state.index, state.incumbent)
    assert math.isnan(brain._ahead._promises(state, span, evidence))


def test_more_channels_than_training_bears_are_not_carried_to_larger_messages() -> None:
    world, brain = _freed(fabric="few_sms_node")
    state = brain._states[0]
    assert any(row.candidate.n_channels > 4 for row in brain._ahead.rows)
    state.max_channels, state.incumbent = 4, BASELINE
    brain._ahead._min_gain = -1.0  # whatever looks best is carried, ever so unsure
    brain._policy.end_lead(state)
    brain._policy.end_trial(state)
    state.quiet_until = NEVER_STEP
    play(world, brain, 2)
    assert brain._ahead.rows
    assert all(row.candidate.n_channels <= 4 for row in brain._ahead.rows)
