"""Hardware that nobody described: the scale of all guesses is a guess, and what runs tells it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, play
from benchmarks.lib.simulated.earlier_jobs import knowledge
from zerotune.agent.nccl import cost_model, fabric
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Phase, Protocol
from zerotune.store.wire import COST_FIELDS
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.features import cell_of


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


@pytest.mark.parametrize("n_steps", [1, 60])
def test_what_nccl_turns_out_not_to_offer_runs_no_longer(n_steps: int) -> None:
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
