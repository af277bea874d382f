"""A job that runs with other variables of NCCL than earlier ones begins with what won then, and trusts none of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain
from zerotune.store.records import Collective, CommunicatorClass, Phase
from zerotune.store.sqlite.database import Store
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.same_machine import same_machine
from zerotune.tuner.service.serving import _loader

PLACE = CommunicatorClass(16, 16)
CALLS = [Call(Collective.all_gather, Phase.forward_gather, 1 << exponent) for exponent in range(16, 24)]
H100 = {"gpu": "H100", "nccl_version": 22809}


@pytest.mark.parametrize(
    ("fabrics", "other"),
    [
        ({"a": H100, "b": H100 | {"NCCL_BUFFSIZE": "8388608", "n_nodes": 4}}, "a"),
        ({"a": H100, "c": H100 | {"NCCL_NTHREADS": "256"}, "b": H100 | {"NCCL_BUFFSIZE": "1"}}, "c"),
        ({"a": H100 | {"gpu": "B200"}, "b": H100}, None),
        ({"a": {}, "b": {}}, None),
        ({"a": H100}, None),
    ],
)
def test_the_same_machine_with_other_variables_is_found(fabrics, other) -> None:
    assert same_machine(fabrics, "b") == other


def test_a_winner_under_other_variables_is_tried_first(tmp_path: Path) -> None:
    world = World("ethernet_boxes", PLACE, CALLS, seed=1, compute_us=100_000.0)
    usual, changed = world.fabric.describe(), world.fabric.describe() | {"NCCL_NSOCKS_PERTHREAD": "4"}
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("earlier", "usual", usual, 16)
        store.record_job("now", "changed", changed, 16)
        brain = make_brain(world)
        for _ in range(150):
            block, record = world.run_step()
            store.record_measurements("usual", "earlier", block)
            world.tell(brain, block, record)
            world.follow(brain.propose(), brain)
        store.flush()
        known = _loader(None, None)(store, "changed")
        assert isinstance(known, Knowledge)
        assert known.recommendations.keys() == Knowledge.from_store(store, "usual").winners().keys()
        assert known.recommendations
        assert all(known.promising(key) is None and known.decided(key) is None for key in known.recommendations)
    warm = World("ethernet_boxes", PLACE, CALLS, seed=2, compute_us=100_000.0)
    brain = make_brain(warm, known)
    for _ in range(20):
        block, record = warm.run_step()
        warm.tell(brain, block, record)
        warm.follow(brain.propose(), brain)
    tried = [one.reason for one in brain.decisions() if one.kind == "explore"]
    assert tried
    assert "this machine with other variables: " in tried[0]
