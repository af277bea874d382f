"""Hardware that nobody described: the scale of all guesses is a guess, and what runs tells it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.lib.data.data_sets import DataSet, Measured, sweep_block
from benchmarks.lib.data.undescribed_machines import undescribed_machine
from benchmarks.lib.simulated.brain_world import Call, World, play
from benchmarks.lib.simulated.earlier_jobs import OnlyThese, knowledge
from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, DecisionKey, Phase, Protocol
from zerotune.store.wire import COST_FIELDS
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy.change_detection import Regimes
from zerotune.tuner.learning.policy.keys import CandidateTables, KeyTable
from zerotune.tuner.learning.policy.surrogate import Surrogate
from zerotune.tuner.modeling.cost_prior import CostPrior
from zerotune.tuner.modeling.features import cell_of


def _undescribed(settings: BrainSettings | None = None) -> Brain:
    return Brain("job", "fabric", {}, Knowledge(), settings or BrainSettings(), lambda: 0.0)


def _table(world: World, collective: Collective, message_bytes: int, costs_us: np.ndarray) -> np.ndarray:
    """A cost table as ranks report it, [7, 3] microseconds."""
    table = np.zeros(1, np.dtype(COST_FIELDS))
    table["n_ranks"], table["n_nodes"] = world.communicator.n_ranks, world.communicator.n_nodes
    table["collective"], table["message_bytes"], table["cost_us"] = collective, message_bytes, costs_us
    return table


def _pull(*, is_described: bool = False, has_table: bool = False) -> float:
    """How far guesses of other cells follow what NCCL's own choice took; 1 = all the way."""
    place = fabric.load("h100_node").communicator(range(8))
    calls = [Call(Collective.all_gather, Phase.other, 1 << exponent) for exponent in range(16, 26, 2)]
    world = World("h100_node", place, calls)
    facts = world.fabric.describe() if is_described else {}
    brain = Brain("job", "fabric", facts, Knowledge(), BrainSettings(explore=False), lambda: 0.0)
    if has_table:
        costs_us = cost_model.cost_table(world.topology, Collective.all_gather, 1 << 20)
        brain.cost_tables(_table(world, Collective.all_gather, 1 << 20, costs_us))
    for _ in range(5):
        block, record = world.run_step()
        block["duration_us"] *= 0.3
        brain.observe(block)
        brain.step_finished(record)
    view = brain.keys[2]
    assert view.default_setting is not None
    moved = {one: math.log(it.us / it.guessed_us) for one, it in brain.predicted(view.key).items()}
    own = moved.pop(BASELINE)
    return float(np.median([by for one, by in moved.items() if cell_of(one) != cell_of(view.default_setting)]) / own)


def test_guesses_of_all_cells_follow_what_runs() -> None:
    assert _pull() > 0.75
    assert _pull(is_described=True) < 0.6, "a described machine's cells have errors of their own"
    assert _pull(has_table=True) < 0.6, "and so has what NCCL believes of its own"


def _after_the_first_step(data: DataSet) -> np.ndarray:
    """By how many of its standard deviations each setting that was not tried is slower than the posterior says, once
    every key has made one call with NCCL's own choice.
    """
    surrogate = Surrogate(CandidateTables(Measured(data.facts, data.problems)), Regimes())
    evidence, keys = surrogate.evidence, KeyTable(surrogate.tables)
    block = sweep_block(data.problems, n_each=1)
    block = block[block["is_default"] > 0]
    called = keys.indices(block)
    keys.learn_defaults(block, called)
    slots = np.array([evidence.slot(key, BASELINE) for key in called.tolist()])
    evidence.add(evidence.calls(slots, keys.logs(block, called)), np.zeros(len(block), np.int64))
    problems, scores = {problem.key: problem for problem in data.problems}, []
    for state in keys.states:
        problem = problems[state.key]
        true_us = dict(zip(problem.candidates, problem.truth_us, strict=True))
        mean, std = surrogate.posterior(state)
        for at, option in enumerate(surrogate.tables.of(state).options):
            if not option.is_baseline and option in true_us and math.isfinite(mean[at]):
                scores.append((math.log(true_us[option]) - float(mean[at])) / float(std[at]))
    return np.array(scores)


def test_nccls_choice_is_not_taken_for_the_cheapest() -> None:
    """It goes by costs of its own: were its cell taken for the one that is guessed to be the cheapest, all others would
    pass for about as slow as it turns out to be.
    """
    scores = [_after_the_first_step(undescribed_machine(seed, 0.03, (4,))) for seed in range(3300, 3304)]
    assert np.mean([np.mean(np.abs(one) <= 1.645) for one in scores]) > 0.8


def _guesses(brain: Brain) -> dict[DecisionKey, dict[Candidate, float]]:
    return {
        one.key: {option: it.guessed_us for option, it in brain.predicted(one.key).items() if option != one.incumbent}
        for one in brain.keys
    }


def test_the_number_of_channels_may_become_known_late() -> None:
    """What was guessed for other candidates is guessed anew, also for keys that were known before."""
    place = fabric.load("h100_ib_2").communicator(range(16))
    early = [Call(Collective.all_gather, Phase.forward_gather, 1 << 16)]
    late = [Call(Collective.all_gather, Phase.backward_gather, 1 << exponent) for exponent in (28, 16)]
    found = []
    for first in (early, early + late):
        world, brain = World("h100_ib_2", place, first), _undescribed(BrainSettings(explore=False))
        play(world, brain, 5)
        before = _guesses(brain)
        world.calls = early + late
        play(world, brain, 5)
        found.append(_guesses(brain))
    assert len(before) == len(found[0]) == 3
    for key, guesses in found[0].items():
        assert guesses == pytest.approx(found[1][key])


def test_new_costs_change_guesses_and_end_a_keys_rest() -> None:
    place = fabric.load("h100_ib_2").communicator(range(16))
    call = Call(Collective.all_gather, Phase.forward_gather, 1 << 20)
    world, brain = World("h100_ib_2", place, [call] * 2), _undescribed()
    offers = OnlyThese({})
    brain.restrict(offers)
    play(world, brain, 20)
    assert brain.keys[0].rests_until_step > world.step
    for change in (
        lambda: brain.cost_tables(_table(world, call.collective, 1 << 20, np.full((7, 3), 50.0, np.float32))),
        lambda: offers.change(*CostPrior({"emulated": "h100_ib_2"}).candidates(place, call.collective)),
        lambda: brain.restrict(CostPrior({"emulated": "ethernet_boxes"})),
    ):
        before = brain.predicted(brain.keys[0].key)
        change()
        after = brain.predicted(brain.keys[0].key)
        assert {one: it.guessed_us for one, it in before.items()} != {one: it.guessed_us for one, it in after.items()}
        assert brain.keys[0].rests_until_step == 0, "there may be something to try now"


def test_knowledge_of_earlier_jobs_may_come_late() -> None:
    place = fabric.load("h100_ib_2").communicator(range(16))
    call = Call(Collective.all_gather, Phase.forward_gather, 1 << 20)
    world, brain = World("h100_ib_2", place, [call] * 2), _undescribed(BrainSettings(explore=False))
    play(world, brain, 3)
    option = next(one for one in brain.predicted(brain.keys[0].key) if not one.is_baseline)
    brain.knowledge = knowledge(world, promising={(call, option): 0.5})
    guessed_us = brain.predicted(brain.keys[0].key)[option].guessed_us
    assert guessed_us == pytest.approx(0.5 * world.truth(call, BASELINE)[0], rel=1e-3)


@pytest.mark.parametrize("n_steps", [1, 60])
def test_settings_that_a_later_cost_table_lacks_end(n_steps: int) -> None:
    """A cost table that comes after a key was tuned; what leads ends, too, as does what was promoted."""
    place = fabric.load("h100_ib_2").communicator(range(16))
    call = Call(Collective.all_gather, Phase.forward_gather, 1 << 20)
    found = Candidate(Algorithm.ring, Protocol.ll128, 8)
    world = World("h100_ib_2", place, [call] * 2)
    world.factors[call, found] = 0.7 * world.truth(call, BASELINE)[0] / world.truth(call, found)[0]
    known = knowledge(world, proven={(call, found): 0.3})
    brain = Brain("job", "fabric", {}, known, BrainSettings(budget_fraction=0.0), lambda: 0.0)
    play(world, brain, n_steps)
    (view,) = brain.keys
    assert (view.provisional if n_steps == 1 else view.incumbent) == found
    assert world.chosen(call) == found
    costs_us = np.full((7, 3), 50.0, np.float32)
    costs_us[int(Algorithm.ring), int(Protocol.ll128)] = -1.0
    brain.cost_tables(_table(world, call.collective, 1 << 20, costs_us))
    play(world, brain, 3)
    (view,) = brain.keys
    assert world.chosen(call).is_baseline
    assert (view.incumbent, view.provisional) == (BASELINE, None)
    assert found in view.banned
    assert [one.candidate for one in brain.decisions() if one.kind == "rollback"][-1:] == [BASELINE]
