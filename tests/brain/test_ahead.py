"""What larger messages than any before run with, when memory became free."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.lib.brain_world import Call, World, make_brain, play
from zerotune.store.records import (
    BASELINE,
    SIZE_CLASSES_PER_OCTAVE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    Protocol,
    size_class,
    size_class_floor,
)
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy import ahead
from zerotune.tuner.learning.policy.choice import NEVER_STEP

MIB = 1 << 20
NODE = CommunicatorClass(8, 1)


def _reduced(n_bytes: int) -> Call:
    return Call(Collective.all_reduce, Phase.gradient_scatter, n_bytes)


def _freed(
    n_bytes: int = MIB, fabric: str = "h100_node", place: CommunicatorClass = NODE, seed: int = 0
) -> tuple[World, Brain]:
    """A job that let go of some memory, and has found something faster since."""
    world = World(fabric, place, [_reduced(n_bytes)] * 4, seed=seed, memory_pressure=0.97)
    brain = make_brain(world)
    play(world, brain, 20)
    world.memory_pressure = 0.6
    play(world, brain, 100)
    return world, brain


def test_the_first_larger_message_runs_with_what_is_faster_than_nccls_choice() -> None:
    world, brain = _freed()
    larger = _reduced(2 * MIB)
    found = world.chosen(larger)
    assert world.truth(larger, found)[0] < 0.8 * world.truth(larger, BASELINE)[0]
    world.calls = [larger] * 4
    play(world, brain, 60)
    assert world.truth(larger, brain._states[1].usual)[0] <= world.truth(larger, found)[0]


@pytest.mark.parametrize(
    ("fabric", "place", "log2_bytes"),
    [
        ("h100_node", NODE, 20),  # NCCL goes over from ring/LL to NVLS
        ("ethernet_boxes", CommunicatorClass(16, 16), 22),  # a tree's lead shrinks, by more than NCCL's costs say
        ("few_sms_node", NODE, 19),
    ],
)
def test_what_would_be_slower_is_left_to_nccl(fabric: str, place: CommunicatorClass, log2_bytes: int) -> None:
    for seed in range(3):
        world, brain = _freed(1 << log2_bytes, fabric, place, seed)
        rows = brain._ahead.rows
        assert (rows[0].min_bytes, rows[-1].max_bytes) == (
            size_class_floor(size_class(1 << log2_bytes) + 1),
            size_class_floor(size_class(1 << log2_bytes) + 1 + 2 * SIZE_CLASSES_PER_OCTAVE) - 1,
        )
        for times in (1.2, 1.5, 2, 2.5, 3, 4, 4.7):
            larger = _reduced(int(times * (1 << log2_bytes)))
            assert world.truth(larger, world.chosen(larger))[0] < 1.02 * world.truth(larger, BASELINE)[0], times


def test_what_is_found_later_counts_too() -> None:
    """Steps may turn out slower with what was faster; and what was tried since tells more of what is not."""
    world, brain = _freed()
    state, rows = brain._states[0], brain._ahead.rows
    guessed = {row.candidate for row in rows} - {BASELINE}
    assert guessed
    brain._policy.set_incumbent(state, BASELINE, "rollback", "")
    state.banned.update(dict.fromkeys(guessed, "steps were slower with it"))
    state.quiet_until = NEVER_STEP  # nor is it tried again
    brain.propose()
    play(world, brain, 2)
    assert brain._ahead.rows != rows
    assert not guessed & {row.candidate for row in brain._ahead.rows}
    assert not brain._ahead.refresh(brain._states, brain._regimes.evidence)
    slot = brain._regimes.evidence.slot(state.index, Candidate(Algorithm.ring, Protocol.simple, 3))
    before = brain._ahead._made_for
    brain._regimes.evidence.n_units[slot] = 8
    brain._regimes.evidence.mean[slot] = 9.0
    brain._ahead.refresh(brain._states, brain._regimes.evidence)
    assert brain._ahead._made_for != before


def test_the_further_away_the_surer_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    _, brain = _freed(256 << 10)
    state, evidence = brain._states[0], brain._regimes.evidence
    end = size_class_floor(state.key.size_class + 1 + SIZE_CLASSES_PER_OCTAVE)
    for doubts, expected in (((0.0, 0.0), (True, True)), ((0.0, 9.0), (True, False)), ((9.0, 9.0), (False, False))):
        monkeypatch.setattr(ahead, "DOUBTS", doubts)
        monkeypatch.setattr(ahead, "DOUBT_UNTRIED", 9.0)
        rows = brain._ahead._next_ones([state], brain._states, evidence)
        guessed = [row for row in rows if not row.candidate.is_baseline]
        assert any(row.min_bytes < end for row in guessed) == expected[0]
        assert any(row.max_bytes >= end for row in guessed) == expected[1]


def test_what_never_ran_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "DOUBTS", (0.0, 0.0))
    monkeypatch.setattr(ahead, "DOUBT_UNTRIED", 0.0)
    _, brain = _freed(8 * MIB)
    state, evidence = brain._states[0], brain._regimes.evidence
    brain._ahead._min_gain = -9.0  # whatever looks best
    ran = {(one.algorithm, one.protocol) for one in evidence.candidates if not one.is_baseline}
    ran.add((state.default_setting.algorithm, state.default_setting.protocol))
    offered = {(one.algorithm, one.protocol) for one in brain._costs.candidates(NODE, Collective.all_reduce)}
    assert offered - ran
    guessed = {row.candidate for row in brain._ahead._next_ones([state], brain._states, evidence)} - {BASELINE}
    assert guessed
    assert {(one.algorithm, one.protocol) for one in guessed} <= ran


def test_what_nccls_costs_say_of_the_two_sizes_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """LL gains at small messages by its latency, and loses at large ones by its bandwidth."""
    _, brain = _freed(256 << 10)
    state, evidence = brain._states[0], brain._regimes.evidence
    state.lead = Candidate(Algorithm.ring, Protocol.ll, 16)
    default = Candidate(Algorithm.ring, Protocol.simple, 24)
    monkeypatch.setattr(brain._ahead, "_default_at", lambda *_, **__: default)
    slots = evidence.find(state.index, BASELINE), evidence.slot(state.index, state.lead)
    evidence.mean[slots[1]] = evidence.log_us(slots[0]) - 0.5
    evidence.n_units[slots[1]] = 8
    near, far = (brain._ahead._promises(state, n_bytes, default, evidence) for n_bytes in (300 << 10, 16 << 20))
    assert near == pytest.approx(0.5, abs=0.1)
    assert far < 0.1


def test_nothing_is_promised_of_what_was_not_measured() -> None:
    _, brain = _freed()
    state, evidence = brain._states[0], brain._regimes.evidence
    default = state.default_setting
    assert brain._ahead._promises(state, 2 * MIB, default, evidence) > 0.05
    state.incumbent = Candidate(Algorithm.ring, state.incumbent.protocol, 3)
    assert math.isnan(brain._ahead._promises(state, 2 * MIB, default, evidence))
    evidence.slot(state.index, state.incumbent)
    assert math.isnan(brain._ahead._promises(state, 2 * MIB, default, evidence))


def test_nothing_is_promised_against_another_algorithm_or_protocol_of_nccls_choice() -> None:
    _, brain = _freed()
    state, evidence = brain._states[0], brain._regimes.evidence
    default = state.default_setting
    others = [Candidate(Algorithm.tree, default.protocol, 24), Candidate(default.algorithm, Protocol.simple, 24)]
    assert [brain._ahead._promises(state, 2 * MIB, one, evidence) for one in others] == pytest.approx(
        [math.nan] * 2, nan_ok=True
    )


def test_without_a_description_nothing_is_known_of_what_is_far() -> None:
    world = World("h100_node", NODE, [_reduced(16 << 10)] * 4, memory_pressure=0.97)
    brain = Brain("job", "", {}, Knowledge.empty(), BrainSettings(), clock=lambda: 0.0)
    play(world, brain, 20)
    state = brain._states[0]
    ran = state.default_setting
    assert brain._ahead._default_at(state, 32 << 10) == ran
    assert brain._ahead._default_at(state, 64 << 10, is_far=True) is None
    table = np.full((7, 3), -1.0, np.float32)
    table[Algorithm.tree, Protocol.ll] = 9.0
    brain._costs.learn_live(NODE, Collective.all_reduce, 16 << 10, table)
    assert brain._ahead._default_at(state, 32 << 10) == Candidate(
        Algorithm.tree, Protocol.ll, brain._costs.max_channels(NODE)
    )
    table[ran.algorithm, ran.protocol] = 8.0
    brain._costs.learn_live(NODE, Collective.all_reduce, 32 << 10, table)
    assert brain._ahead._default_at(state, 32 << 10) == ran
    assert brain._ahead._default_at(state, 64 << 10, is_far=True) is None


def test_where_nccl_goes_over_to_another_algorithm_or_protocol_it_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, brain = _freed()
    state, evidence = brain._states[0], brain._regimes.evidence
    monkeypatch.setattr(ahead, "DOUBTS", (-9.0, -9.0))
    changes_at = size_class_floor(state.key.size_class + 3) + 1  # of which the class's middle knows nothing
    ring, tree = Candidate(Algorithm.ring, Protocol.ll, 24), Candidate(Algorithm.tree, Protocol.ll, 24)
    slot = evidence.slot(state.index, tree)
    evidence.n_units[slot], evidence.mean[slot] = 8, evidence.log_us(evidence.find(state.index, BASELINE))
    monkeypatch.setattr(brain._ahead, "_default_at", lambda _, n_bytes, **__: ring if n_bytes < changes_at else tree)
    left = [row for row in brain._ahead._next_ones([state], brain._states, evidence) if row.candidate.is_baseline]
    assert [(row.min_bytes, row.max_bytes) for row in left] == [
        (changes_at - 1, size_class_floor(state.key.size_class + 4) - 1)
    ]


def test_nothing_is_guessed_against_what_never_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    _, brain = _freed()
    state, evidence = brain._states[0], brain._regimes.evidence
    monkeypatch.setattr(ahead, "DOUBTS", (-9.0, -9.0))
    default = Candidate(Algorithm.tree, Protocol.simple, 24)
    monkeypatch.setattr(brain._ahead, "_default_at", lambda *_, **__: default)
    assert all(row.candidate.is_baseline for row in brain._ahead._next_ones([state], brain._states, evidence))
    evidence.n_units[evidence.slot(state.index, default)] = 8
    assert not all(row.candidate.is_baseline for row in brain._ahead._next_ones([state], brain._states, evidence))


def test_the_nearer_sizes_come_first_where_not_all_can_be_thought_about(monkeypatch: pytest.MonkeyPatch) -> None:
    _, brain = _freed()
    state, evidence = brain._states[0], brain._regimes.evidence
    monkeypatch.setattr(ahead, "DOUBTS", (-9.0, -9.0))
    monkeypatch.setattr(ahead, "MAX_OPINIONS", 4)
    for row in brain._ahead._next_ones([state, state], brain._states, evidence):
        is_near = row.max_bytes < size_class_floor(state.key.size_class + 3)
        assert row.candidate.is_baseline != is_near


def test_more_channels_than_training_bears_are_not_carried_to_larger_messages() -> None:
    world, brain = _freed(16 << 10, fabric="few_sms_node")
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
