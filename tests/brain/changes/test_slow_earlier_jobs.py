"""What a job leaves that met a slow network, for a part of its life or all of it, is worth as much to the next."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from benchmarks.lib.simulated.brain_world import Call, SlowForATime, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, DecisionKey, Phase, size_class
from zerotune.store.sqlite.database import Store
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling import trainer

KINDS = (
    (Collective.all_gather, Phase.forward_gather),
    (Collective.all_gather, Phase.backward_gather),
    (Collective.reduce_scatter, Phase.gradient_scatter),
)
N_STEPS = 200


def _world(name: str, seed: int) -> SlowForATime:
    place = fabric.load(name).communicator(range(8 if name == "as_believed" else 16))
    calls = [Call(*kind, n_bytes) for n_bytes in (1 << 16, 1 << 20, 1 << 24) for kind in KINDS for _ in range(2)]
    world = SlowForATime(name, place, calls, seed=seed)
    world.compute_us = 2.0 * sum(world.truth(call, BASELINE)[0] for call in calls)
    return world


def _after(name: str, slow_from: int, store: Store) -> Knowledge:
    """What a job leaves whose network slows down at that step."""
    world = _world(name, seed=100)
    world.level, world.slow, world.store = 1.5, range(slow_from, N_STEPS), store
    store.record_job("first", world.fabric.fabric_id, world.fabric.describe(), world.communicator.n_ranks)
    play(world, make_brain(world), N_STEPS)
    store.flush()
    model = trainer.train(store, world.fabric.fabric_id)
    assert model is not None
    trainer.keep(store, model)
    store.flush()
    return Knowledge.from_store(store, world.fabric.fabric_id)


def _cost(world: World, knowledge: Knowledge, n_steps: int) -> float:
    """How much longer (share) the calls of a job take than with NCCL's own choice."""
    brain = make_brain(world, knowledge)
    usual_us = sum(world.truth(call, BASELINE)[0] for call in world.calls)
    ours_us = 0.0
    for _ in range(n_steps):
        ours_us += sum(world.truth(call, world.chosen(call))[0] for call in world.calls)
        play(world, brain, 1)
    return ours_us / (n_steps * usual_us) - 1.0


@pytest.mark.slow
@pytest.mark.parametrize("slow_from", [60, 0])
def test_what_wins_is_known_from_a_job_that_met_a_slow_network(tmp_path: Path, slow_from: int) -> None:
    with Store.open(tmp_path / "store.db") as store:
        known = _after("h100_ib_2", slow_from, store)
    world = _world("h100_ib_2", seed=200)
    for call in world.calls:
        key = DecisionKey(world.communicator, call.collective, call.phase, size_class(call.message_bytes))
        decided = known.decided(key)
        if decided is not None:
            assert world.truth(call, decided[0])[0] <= world.truth(call, BASELINE)[0]
    cold = _cost(_world("h100_ib_2", seed=200), Knowledge(), 60)
    assert _cost(world, known, 60) < cold


@pytest.mark.parametrize("slow_from", [60, 0])
def test_where_nothing_is_to_be_gained_no_more_is_tried(tmp_path: Path, slow_from: int) -> None:
    with Store.open(tmp_path / "store.db") as store:
        known = _after("as_believed", slow_from, store)
    seeds = range(200, 203)
    cold = mean(_cost(_world("as_believed", seed), Knowledge(), 60) for seed in seeds)
    warm = mean(_cost(_world("as_believed", seed), known, 60) for seed in seeds)
    assert (warm - cold) / 3.0 < 0.005, "a third of a step is calls"
    assert warm / 3.0 < 0.01, "the budget is a hundredth of a step"
