"""What NCCL does not offer, though no cost table says so: it runs its own choice, which passes for nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Candidate, Collective, Phase, Protocol

GATHER, SCATTER = Collective.all_gather, Collective.reduce_scatter


@dataclass
class Refuses(World):
    """Runs NCCL's own choice where it is asked for Simple in a reduce-scatter."""

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        is_refused = call.collective is SCATTER and candidate.protocol is Protocol.simple
        return super().truth(call, BASELINE if is_refused else candidate)


@pytest.mark.parametrize("seed", range(3))
def test_a_setting_that_nccl_refuses_is_soon_not_asked_for(seed: int) -> None:
    place = fabric.load("h100_ib_16").communicator(range(16))
    calls = [
        Call(collective, phase, 3 << exponent - 1)
        for exponent in (24, 25)
        for collective, phase in ((GATHER, Phase.forward_gather), (SCATTER, Phase.gradient_scatter))
        for _ in range(2)
    ]
    world = Refuses("h100_ib_16", place, calls, seed=seed)
    assert all(world.setting(call, BASELINE).protocol is not Protocol.simple for call in calls)
    brain = make_brain(world)
    plans = play(world, brain, 200)
    asks = [
        any(row.collective is SCATTER and row.candidate.protocol is Protocol.simple for row in one.rows)
        for one in plans
    ]
    assert 1 <= sum(asks) <= 3
    scatters = [state for state in brain.keys if state.key.collective is SCATTER]
    assert any(one.protocol is Protocol.simple for state in scatters for one in state.banned)
    told = [one for one in brain.decisions() if one.key.collective is SCATTER]
    assert "rollback" in {one.kind for one in told}
    # What ran in its place is as fast as NCCL's own choice: taken for it, it would lead.
    assert {one.kind for one in told if one.candidate.protocol is Protocol.simple} == {"explore"}
    assert not any(state.incumbent.protocol is Protocol.simple for state in scatters)


@dataclass
class Lowers(World):
    """Runs at most half as many channels as NCCL would by itself."""

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        most = self.setting(call, BASELINE).n_channels // 2
        if candidate.n_channels > most:
            candidate = Candidate(candidate.algorithm, candidate.protocol, most)
        return super().truth(call, candidate)


@pytest.mark.parametrize("seed", range(3))
def test_more_channels_than_nccl_runs_are_soon_not_asked_for(seed: int) -> None:
    place = fabric.load("h100_ib_16").communicator(range(16))
    calls = [Call(GATHER, Phase.forward_gather, 3 << exponent - 1) for exponent in (24, 25) for _ in range(2)]
    world = Lowers("h100_ib_16", place, calls, seed=seed)
    brain = make_brain(world)
    play(world, brain, 300)
    lowered = {one: why for state in brain.keys for one, why in state.banned.items() if "NCCL runs it on" in why}
    assert lowered, [dict(state.banned) for state in brain.keys]
    most = world.setting(calls[0], BASELINE).n_channels // 2
    assert all(one.n_channels > most for one in lowered)
