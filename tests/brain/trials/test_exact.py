"""Under --numerics exact nothing is asked for where NCCL computes, whatever earlier jobs proved."""

from __future__ import annotations

import pytest

from benchmarks.lib.simulated.brain_world import World, make_brain, play, zero3_step
from benchmarks.lib.simulated.earlier_jobs import knowledge
from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.catalog import COMPUTING
from zerotune.store.records import BASELINE, Algorithm, Candidate, Protocol
from zerotune.tuner.learning.brain import BrainSettings


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("is_warm", [True, False])
def test_only_what_computes_nothing_is_tuned(is_exact: bool, is_warm: bool) -> None:
    place = fabric.load("h100_ib_16").communicator(range(16))
    world = World("h100_ib_16", place, zero3_step())
    candidate = Candidate(Algorithm.ring, Protocol.ll128, 8)
    known = knowledge(world, proven={(call, candidate): 0.1 for call in world.calls}) if is_warm else None
    brain = make_brain(world, known, BrainSettings(is_exact=is_exact))
    plans = play(world, brain, 150)
    rows = [row for plan in plans for _, stage in plan.stages() for row in stage.rows]
    computing = [row for row in rows if row.collective in COMPUTING and row.candidate != BASELINE]
    assert any(row.collective not in COMPUTING and row.candidate != BASELINE for row in rows)
    assert bool(computing) != is_exact
    reasons = {state.incumbent_reason for state in brain.keys if state.key.collective in COMPUTING}
    assert any("--numerics exact" in reason for reason in reasons) == is_exact
