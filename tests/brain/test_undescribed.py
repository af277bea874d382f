"""Hardware that nobody described: the scale of all guesses is a guess, and what runs tells it."""

from __future__ import annotations

import numpy as np
from brain_world import Call, World, play

from agent.nccl import fabric
from store.records import Collective, Phase
from tuner.brain import Brain, BrainSettings
from tuner.features import cell_of
from tuner.knowledge import Knowledge
from tuner.policy.field import FieldBook


def _pull(*, is_described: bool) -> float:
    """How far guesses of other cells follow what NCCL's own choice took; 1 = all the way."""
    place = fabric.load("h100_node").communicator(range(8))
    calls = [Call(Collective.all_gather, Phase.other, 1 << exponent) for exponent in range(16, 26, 2)]
    world = World("h100_node", place, calls)
    facts = world.fabric.describe() if is_described else {}
    brain = Brain("job", "fabric", facts, Knowledge.empty(), BrainSettings(explore=False), lambda: 0.0)
    for _ in range(5):
        block, record = world.run_step()
        block["duration_us"] *= 0.3
        brain.observe(block)
        brain.step_finished(record)
    state, evidence = brain._states[2], brain._regimes.evidence
    mean, _ = brain._outlook.posterior(state, brain._states, evidence)
    guess = brain._outlook.fields.of(state).table[:, 4]
    moved = mean - guess
    options = brain._outlook.fields.of(state).options
    others = [at for at, one in enumerate(options) if at and cell_of(one) != cell_of(state.default_setting)]
    return float(np.nanmedian(moved[others]) / moved[0])


def test_guesses_of_all_cells_follow_what_runs() -> None:
    assert _pull(is_described=False) > 0.75
    assert _pull(is_described=True) < 0.6, "a described machine's cells have errors of their own"


def test_a_cost_table_of_nccl_ends_the_guesswork() -> None:
    place = fabric.load("h100_node").communicator(range(8))
    family = (place, Collective.all_gather)
    brain = Brain("job", "fabric", {}, Knowledge.empty(), BrainSettings(), lambda: 0.0)
    assert brain._outlook.fields.is_guesswork(family)
    table = np.full((7, 3), -1.0, np.float32)
    table[1] = 40.0, 30.0, 20.0
    brain._costs.learn_live(*family, 1 << 20, table)
    assert not brain._outlook.fields.is_guesswork(family)


def test_how_many_channels_there_are_may_become_known_late() -> None:
    """What was guessed for other candidates is guessed anew, also for keys that were known before."""
    place = fabric.load("h100_ib_2").communicator(range(16))
    early = [Call(Collective.all_gather, Phase.forward_gather, 1 << 16)]
    late = [Call(Collective.all_gather, Phase.backward_gather, 1 << exponent) for exponent in (28, 16)]
    world = World("h100_ib_2", place, early)
    brain = Brain("job", "fabric", {}, Knowledge.empty(), BrainSettings(), lambda: 0.0)
    play(world, brain, 40)
    world.calls = early + late
    play(world, brain, 40)
    fresh = FieldBook(brain._costs)
    for state in brain._states:
        kept = brain._outlook.fields.of(state)
        state.field = None
        made_anew = fresh.of(state)
        assert kept.options == made_anew.options
        np.testing.assert_allclose(kept.table, made_anew.table)
