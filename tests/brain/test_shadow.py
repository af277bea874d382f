"""A brain in shadow decides and explains; nothing that it decides runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.simulated.brain_world import World, make_brain, play, zero3_step
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE
from zerotune.store.sqlite.database import Store
from zerotune.tuner.learning.brain import BrainSettings
from zerotune.tuner.learning.explaining.shadow import ShadowBrain
from zerotune.tuner.learning.knowledge import Knowledge

NAME = "h100_ib_2"
SHADOW = BrainSettings(shadow=True)


def _world(seed: int) -> World:
    return World(NAME, fabric.load(NAME).communicator(range(16)), zero3_step(), seed=seed, compute_us=1000.0)


def _communication_us(world: World) -> float:
    return sum(world.truth(call, world.chosen(call))[0] for call in world.calls)


def _in_shadow(world: World, knowledge: Knowledge | None = None) -> ShadowBrain:
    brain = make_brain(world, knowledge, SHADOW)
    assert isinstance(brain, ShadowBrain)
    return brain


def test_nothing_that_is_decided_runs_and_all_of_it_is_told() -> None:
    world = _world(1)
    own_us, brain = _communication_us(world), _in_shadow(world)
    assert play(world, brain, 120) == []
    assert _communication_us(world) == own_us
    assert (brain.spent_percent, brain.n_explored) == (0.0, 0)
    decisions = brain.decisions()
    assert {"explore", "shadow"} <= {one.kind for one in decisions}
    assert {one.candidate for one in decisions if one.kind == "shadow"} == {BASELINE}
    assert sum(one.kind == "shadow" for one in decisions) == 2, "after 50 steps, and after 100"
    assert brain.predicted_gain().n_settings > 0


@pytest.fixture(scope="module")
def knowledge(tmp_path_factory: pytest.TempPathFactory) -> Knowledge:
    """What a job that was tuned leaves."""
    world, path = _world(1), Path(tmp_path_factory.mktemp("store")) / "s.db"
    with Store.open(path) as store:
        store.record_job("earlier", "fabric", world.fabric.describe(), 16)
        brain = make_brain(world)
        for _ in range(150):
            block, record = world.run_step()
            store.record_measurements("fabric", "earlier", block)
            world.tell(brain, block, record)
            world.follow(brain.propose(), brain)
        store.flush()
        return Knowledge.from_store(store, "fabric")


def test_shadow_predicts_what_an_earlier_winner_saves(knowledge: Knowledge) -> None:
    shadowed, tuned = _world(2), _world(2)
    brain = _in_shadow(shadowed, knowledge)
    play(shadowed, brain, 60)
    step_us = brain.budget.training_us / brain.budget.n_steps
    play(tuned, make_brain(tuned, knowledge), 60)
    saved = (_communication_us(shadowed) - _communication_us(tuned)) / step_us
    predicted = brain.predicted_gain()
    assert saved > 0.01
    assert predicted.share == pytest.approx(saved, rel=0.35)
    assert "prior" in {one.kind for one in brain.decisions()}
