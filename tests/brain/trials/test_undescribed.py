"""Hardware that nobody described: the scale of all guesses is a guess, and what runs tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.lib import generated_csvs
from benchmarks.lib.brain_world import Call, World, play
from benchmarks.lib.data_sets import of_folder
from benchmarks.modeling.prediction_first_step import after_the_first_step
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Phase, Protocol
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy.choice import NOT_OFFERED
from zerotune.tuner.learning.policy.keys import FieldBook
from zerotune.tuner.modeling.features import CostPrior, cell_of


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
    mean, _ = brain._surrogate.posterior(state, brain._states, evidence)
    guess = brain._surrogate.fields.of(state).table[:, 4]
    moved = mean - guess
    options = brain._surrogate.fields.of(state).options
    others = [at for at, one in enumerate(options) if at and cell_of(one) != cell_of(state.default_setting)]
    return float(np.nanmedian(moved[others]) / moved[0])


def test_guesses_of_all_cells_follow_what_runs() -> None:
    assert _pull(is_described=False) > 0.75
    assert _pull(is_described=True) < 0.6, "a described machine's cells have errors of their own"


def test_what_nccl_chose_is_not_taken_for_the_cheapest(tmp_path: Path) -> None:
    """It goes by costs of its own: were its cell taken for the one that is guessed to be the cheapest, all others would
    pass for about as slow as it turns out to be.
    """
    for seed in range(3300, 3304):
        generated_csvs.write(tmp_path / f"machine_{seed}.csv", seed, 0.03, (4,))
    scores = [after_the_first_step(data) for data in of_folder(tmp_path)]
    assert len(scores) == 4
    assert np.mean([np.mean(np.abs(one) <= 1.645) for one in scores]) > 0.8


def test_nccls_own_choice_is_guessed_by_the_cell_that_ran() -> None:
    place = fabric.load("h100_ib_2").communicator(range(16))
    world = World("h100_ib_2", place, [Call(Collective.all_gather, Phase.other, 1 << 14)])
    brain = Brain("job", "fabric", {}, Knowledge.empty(), BrainSettings(explore=False), lambda: 0.0)
    block, _ = world.run_step()
    block["algorithm"], block["protocol"] = Algorithm.ring, Protocol.simple
    brain.observe(block)
    state, fields = brain._states[0], brain._surrogate.fields
    assert state.default_setting is not None
    simple = Candidate(Algorithm.ring, Protocol.simple, brain._costs.max_channels(place))
    asked = state.family[0], state.family[1], (simple,), state.message_bytes
    assert fields.of(state).table[0, 4] == pytest.approx(brain._costs.log_cost(*asked)[0, 0])


def test_a_cost_table_of_nccl_ends_the_guesswork() -> None:
    place = fabric.load("h100_node").communicator(range(8))
    family = (place, Collective.all_gather)
    brain = Brain("job", "fabric", {}, Knowledge.empty(), BrainSettings(), lambda: 0.0)
    assert brain._surrogate.fields.is_guesswork(family)
    table = np.full((7, 3), -1.0, np.float32)
    table[1] = 40.0, 30.0, 20.0
    brain._costs.learn_live(*family, 1 << 20, table)
    assert not brain._surrogate.fields.is_guesswork(family)


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
        kept = brain._surrogate.fields.of(state)
        state.field = None
        made_anew = fresh.of(state)
        assert kept.options == made_anew.options
        np.testing.assert_allclose(kept.table, made_anew.table)


def test_whoever_changes_costs_need_not_tell_anybody() -> None:
    place = fabric.load("h100_ib_2").communicator(range(16))
    world = World("h100_ib_2", place, [Call(Collective.all_gather, Phase.forward_gather, 1 << 20)] * 2)
    brain = Brain("job", "fabric", {}, Knowledge.empty(), BrainSettings(), lambda: 0.0)
    play(world, brain, 3)
    state, fields = brain._states[0], brain._surrogate.fields
    state.quiet_until = 1 << 40
    before = fields.of(state)
    assert fields.of(state) is before
    brain._costs.learn_live(place, Collective.all_gather, 1 << 20, np.full((7, 3), 50.0, np.float32))
    after = fields.of(state)
    assert after is not before
    assert not np.allclose(after.table[0, 4], before.table[0, 4])
    assert state.quiet_until == 0, "there may be something to try now"
    for change in (lambda: brain.restrict(CostPrior({"emulated": "h100_ib_2"})), lambda: _learned(brain)):
        before = fields.of(state)
        change()
        assert fields.of(state) is not before


def _learned(brain: Brain) -> None:
    brain.knowledge = Knowledge.empty()


def test_what_nccl_turns_out_not_to_offer_runs_no_longer() -> None:
    """A cost table that comes after a key was tuned; what steps spoke against does not come back either."""
    place = fabric.load("h100_ib_2").communicator(range(16))
    call = Call(Collective.all_gather, Phase.forward_gather, 1 << 20)
    brain = Brain("job", "fabric", {}, Knowledge.empty(), BrainSettings(budget_fraction=0.0), lambda: 0.0)
    world = World("h100_ib_2", place, [call] * 2)
    play(world, brain, 3)
    state = brain._states[0]
    promoted = Candidate(Algorithm.ring, Protocol.ll128, 8)
    brain._policy.set_incumbent(state, promoted, "promote", "measured faster")
    brain._policy.begin_lead(state, Candidate(Algorithm.ring, Protocol.ll128, 16))
    play(world, brain, 3)
    assert world.chosen(call).protocol is Protocol.ll128
    table = np.full((7, 3), 50.0, np.float32)
    table[int(Algorithm.ring), int(Protocol.ll128)] = -1.0
    brain._costs.learn_live(place, Collective.all_gather, 1 << 20, table)
    play(world, brain, 3)
    assert world.chosen(call).is_baseline
    assert state.lead is None
    assert state.banned[promoted] == NOT_OFFERED
    assert [one.candidate for one in brain.decisions() if one.kind == "rollback"][-1:] == [BASELINE]
