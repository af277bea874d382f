"""What the brain promises and hardly shows: each of these would otherwise be lost without a word."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.lib.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, DecisionKey, Phase, Protocol
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy.keys import KeyState

GATHER = Call(Collective.all_gather, Phase.forward_gather, 1 << 17)
SCATTER = Call(Collective.reduce_scatter, Phase.gradient_scatter, 1 << 17)
TRIED = Candidate(Algorithm.pat, Protocol.simple, 4)


def _job(settings: BrainSettings | None = None, *, seed: int = 0, flat: bool = False) -> tuple[World, Brain, KeyState]:
    """Eight steps of a job with gathers and scatters; the gathers' key."""
    place = fabric.load("ethernet_boxes").communicator(range(16))
    world = World("ethernet_boxes", place, [GATHER, SCATTER] * 2, compute_us=100_000.0, seed=seed, flat=flat)
    brain = make_brain(world, settings=settings)
    play(world, brain, 8)
    return world, brain, _gathers(brain)


def _gathers(brain: Brain) -> KeyState:
    return next(state for state in brain._states if state.key.collective is Collective.all_gather)


NOTHING_BY_ITSELF = BrainSettings(budget_fraction=0.0)


def _ran(world: World) -> bool:
    return world.chosen(GATHER) == TRIED


@pytest.mark.parametrize("seed", range(4))
def test_what_is_on_trial_while_the_network_recovers_is_not_promoted_for_that(seed: int) -> None:
    """Its calls are a third shorter than those of before, but so are everybody's."""
    world, brain, state = _job(NOTHING_BY_ITSELF, seed=seed, flat=True)
    world.slowdown = {"all_gather": 1.5, "reduce_scatter": 1.5}
    play(world, brain, 40)
    brain.decisions()
    brain._policy.begin_trial(state, TRIED, "to be seen", (0.3, 0.3))
    while not _ran(world):
        play(world, brain, 1)
    world.slowdown = {}
    play(world, brain, 12)
    assert [one.kind for one in brain.decisions() if one.kind == "promote"] == []


def _promote(world: World, brain: Brain, state: KeyState) -> None:
    """TRIED is the incumbent from now on; plays until it has run."""
    brain._policy.set_incumbent(state, TRIED, "promote", "measured faster")
    brain._urgent = True
    while not _ran(world):
        play(world, brain, 1)


def test_plans_tell_that_gathers_come_after_the_step_once_that_is_seen() -> None:
    """ZeRO-1: gradients are reduced, and updated parameters gathered once per step."""
    world, brain, _ = _job()
    assert not world.plan.gathers_after_step
    one_step = [*[(Collective.reduce_scatter, 25 << 20)] * 6, *[(Collective.all_gather, 25 << 20)] * 6]
    one_step.append((Collective.all_reduce, 4))
    block = np.zeros(len(one_step), np.dtype(OBSERVATION_FIELDS))
    block["collective"], block["message_bytes"] = zip(*one_step, strict=True)
    for _ in range(6):
        brain.sequence(block)
    assert brain._fingerprint.gathers_after_step, brain.stage
    play(world, brain, 2)
    assert world.plan.gathers_after_step


@pytest.mark.parametrize("is_proven", [False, True])
def test_nothing_is_tried_while_the_budget_is_overdrawn(is_proven: bool) -> None:
    """What earlier jobs proved runs on: it costs nothing as far as is known."""
    world, brain, state = _job(BrainSettings(budget_fraction=0.01))
    brain._policy.reopen(brain._states, 0, 1)
    if is_proven:
        brain._policy.begin_lead(state, TRIED, (0.05, 0.05), is_proven=True)
    else:
        brain._policy.begin_trial(state, TRIED, "to be seen", (0.05, 0.05))
    state.trial_until_units = 1e9
    brain.budget.spend(1e6)
    n_ran = 0
    for _ in range(6):
        assert brain.budget.remaining_us < 0
        play(world, brain, 1)
        n_ran += _ran(world)
        assert all(world.chosen(call) in (BASELINE, TRIED) for call in world.calls)
    assert (n_ran > 0) == is_proven
    if not is_proven:
        brain.budget.spend(-1e9)
        play(world, brain, 6)
        assert brain.n_explored > 0


def test_another_network_is_another_chance_for_what_was_banned() -> None:
    """It was catastrophic on the network of before, and is the best there is on this one."""
    world, brain, state = _job()
    play(world, brain, 40)
    best = max(
        (one for one in brain._costs.candidates(world.communicator, GATHER.collective) if one != state.incumbent),
        key=lambda one: -world.truth(GATHER, one)[0],
    )
    brain._policy.drop(state, best, "3 times slower", ban=True)
    play(world, brain, 20)
    assert best in state.banned
    assert world.chosen(GATHER) != best
    world.slowdown = {"all_gather": 1.6, "reduce_scatter": 1.6}
    us, ran = world.truth(GATHER, best)
    world._truth[GATHER, best] = (0.4 * us / 1.6, ran)
    play(world, brain, 12)
    assert brain.regime == 1
    assert not state.banned
    play(world, brain, 60)
    assert state.usual == best


@dataclass
class Line:
    """What an earlier job left of one setting."""

    key: DecisionKey
    candidate: Candidate
    is_default: bool
    median_us: float
    count: int = 100
    std_us: float = 2.0
    level_std: float = 0.0


def _proven(key: DecisionKey, candidate: Candidate) -> Knowledge:
    """An earlier job in which `candidate` took a third of NCCL's own choice."""
    lines = [Line(key, BASELINE, True, 300.0), Line(key, candidate, False, 100.0)]
    return Knowledge(lines, by_job=[lines])


@pytest.mark.parametrize("pressure", [0.3, 0.97])
def test_without_exploration_only_what_earlier_jobs_proved_is_used(pressure: float) -> None:
    world, _, state = _job()
    options = make_brain(world)._costs.candidates(world.communicator, GATHER.collective)
    best = min(options, key=lambda one: world.truth(GATHER, one)[0])
    world, _, _ = _job()
    brain = make_brain(world, _proven(state.key, best), BrainSettings(explore=False))
    plans = play(world, brain, 60)
    world.memory_pressure = pressure
    plans += play(world, brain, 5)
    world.memory_pressure = 0.2
    plans += play(world, brain, 35)
    assert _gathers(brain).incumbent == best
    if pressure < 0.9:
        assert {row.candidate for plan in plans for row in plan.rows} == {best}
    assert all(row.candidate == best for row in plans[-1].rows)
    assert brain.n_explored == 0
    assert {one.kind for one in brain.decisions()} <= {"prior", "promote", "keep"}


def test_what_earlier_jobs_proved_and_is_far_slower_here_is_charged_and_not_tried_again() -> None:
    world, _, state = _job()
    _, ran = world.truth(GATHER, TRIED)
    world._truth[GATHER, TRIED] = (10.0 * world.truth(GATHER, BASELINE)[0], ran)
    brain = make_brain(world, _proven(state.key, TRIED))
    lost_us, n_ran = 0.0, 0
    for _ in range(12):
        n_ran += _ran(world)
        lost_us += 2 * _ran(world) * (world.truth(GATHER, TRIED)[0] - world.truth(GATHER, BASELINE)[0])
        play(world, brain, 1)
    assert 1 <= n_ran <= 2
    assert TRIED in _gathers(brain).banned
    assert "rollback" in {one.kind for one in brain.decisions()}
    assert brain.budget.spent_us == pytest.approx(lost_us, rel=0.1)
    assert brain.n_explored == 0, "it was none of this job's trials"


def test_what_earlier_jobs_proved_and_is_faster_costs_nothing() -> None:
    world, _, state = _job()
    best = min(
        make_brain(world)._costs.candidates(world.communicator, GATHER.collective),
        key=lambda one: world.truth(GATHER, one)[0],
    )
    brain = make_brain(world, _proven(state.key, best), NOTHING_BY_ITSELF)
    play(world, brain, 30)
    assert _gathers(brain).incumbent == best
    assert brain.budget.spent_us == 0.0


def test_steps_of_another_network_are_no_yardstick_for_plans() -> None:
    """Steps are as long as before, since computation is most of them: only calls tell that the network is another."""
    world, brain, state = _job(NOTHING_BY_ITSELF)
    world.compute_us *= 20
    play(world, brain, 60)
    _promote(world, brain, state)
    play(world, brain, 5)
    assert brain._step_feedback._guarded.is_watching
    world.slowdown = {"all_gather": 1.6, "reduce_scatter": 1.6}
    n_steps = 0
    while brain.regime == 0:
        play(world, brain, 1)
        n_steps += 1
    assert n_steps <= 25
    assert not brain._step_feedback._guarded.is_watching
    assert brain._step_feedback.is_busy, "too few steps are known again to guard by"
