"""What runs while memory is short: only what has run already, and of that whatever is fastest."""

from __future__ import annotations

import copy
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import (
    Call,
    World,
    gain_share,
    make_brain,
    play,
    zero3_step,
)
from benchmarks.lib.simulated.tight_world import TightWorld
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    size_class,
)
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy.memory import MemoryGate

MIB = 1 << 20
BOXES = CommunicatorClass(16, 16)
RING, TREE, PAT = (Candidate(one, Protocol.simple, 4) for one in (Algorithm.ring, Algorithm.tree, Algorithm.pat))


class Line(NamedTuple):
    """What a store remembers of one setting."""

    key: DecisionKey
    candidate: Candidate
    median_us: float
    is_default: bool
    count: int = 50
    level_std: float = 0.0

    @property
    def std_us(self) -> float:
        return 0.02 * self.median_us


def _says_another_algorithm(world: World, *, is_proven: bool = True) -> Knowledge:
    """Earlier jobs, with more memory, found another algorithm to be a third faster than NCCL's own choice."""
    lines = []
    options = make_brain(world).costs
    for call in dict.fromkeys(world.calls):
        usual_us, ran = world.truth(call, BASELINE)
        others = (
            one
            for one in options.candidates(world.communicator, call.collective)
            if one.algorithm not in (None, ran.algorithm)
        )
        other = min(others, key=lambda one: world.truth(call, one)[0])
        key = DecisionKey(world.communicator, call.collective, call.phase, size_class(call.message_bytes))
        lines += [Line(key, ran, usual_us, True), Line(key, other, 0.7 * usual_us, False)]
    return Knowledge(lines if is_proven else (), by_job=[lines])


def _device_for_one_algorithm(device_mb: float | None = None) -> TightWorld:
    """Room for what NCCL connects by itself and next to nothing else; all of the device, or the rest is training's."""
    calls = zero3_step(shard_bytes=MIB, n_ranks=1)
    alone = TightWorld("ethernet_boxes", BOXES, calls)
    alone.run_step()
    world = TightWorld("ethernet_boxes", BOXES, calls, free_mb=1.02 * alone.taken_mb)
    if device_mb is not None:
        world.fabric = copy.copy(world.fabric)
        world.fabric.memory = msgspec.structs.replace(world.fabric.memory, device_mb=device_mb * alone.taken_mb)
        world.free_mb = world.fabric.memory.device_mb
    return world


@pytest.mark.parametrize("latency_steps", [1, 3])
def test_what_earlier_jobs_proved_is_not_connected_when_a_job_begins_with_little_memory(latency_steps: int) -> None:
    world = _device_for_one_algorithm()
    play(world, make_brain(world, _says_another_algorithm(world)), 40, latency_steps=latency_steps)
    assert set(world.connected) == {Algorithm.pat}
    assert world.memory_pressure > 0.92


def test_trials_that_begin_together_fit_together() -> None:
    """Gathers would try PAT and all-reduces a tree; both fit alone."""
    calls = [
        *[Call(Collective.all_gather, Phase.other, 8 * MIB)] * 4,
        *[Call(Collective.all_reduce, Phase.other, 4 * MIB)] * 4,
    ]
    for free in (0.5, 1.3):
        world = TightWorld("ethernet_boxes", BOXES, calls)
        ring, tree, pat = (
            world.fabric.memory_mb(BOXES, {one: world.topology.comm_channels})
            for one in (Algorithm.ring, Algorithm.tree, Algorithm.pat)
        )
        world.fabric = copy.copy(world.fabric)
        device_mb = (ring + max(tree, pat) + free * min(tree, pat)) / 0.92
        world.fabric.memory = msgspec.structs.replace(world.fabric.memory, device_mb=device_mb)
        world.free_mb = device_mb
        play(world, make_brain(world), 250)
        assert world.memory_pressure <= 0.92
        assert (len(world.connected) == 3) == (free > 1)


SHORT_FOR_GOOD = {
    "few_sms_node": CommunicatorClass(8, 1),
    "h100_ib_2": CommunicatorClass(16, 2),
    "h100_node": CommunicatorClass(8, 1),
}


@pytest.mark.parametrize("name", SHORT_FOR_GOOD)
def test_where_memory_is_short_from_first_to_last_the_gain_is_had_all_the_same(name: str) -> None:
    """Frameworks cache what memory there is, so most large jobs run like that."""
    calls = [
        *(call for exponent in (16, 20, 23) for call in zero3_step(shard_bytes=1 << exponent, n_ranks=1)),
        *[Call(Collective.all_reduce, Phase.gradient_scatter, 4 * MIB)] * 3,
    ]
    world = World(name, SHORT_FOR_GOOD[name], calls, seed=1, memory_pressure=0.97)
    brain = make_brain(world)
    plans = play(world, brain, 400)
    usual, best, ours = (sum(some) for some in zip(*gain_share(world, brain).values(), strict=True))
    assert usual - ours > 0.9 * (usual - best)
    connected = brain.memory.connected[world.communicator]
    for row in (row for plan in plans for row in plan.rows):
        assert row.candidate.n_channels <= connected[row.candidate.algorithm]


# ---- the gate ----


def _gate(**facts: float) -> MemoryGate:
    gate = MemoryGate(0.92, {"device_mb": 1000.0, "channel_mb": 9.0, **facts})
    gate.ran(_calls(0, 0.3))
    gate.heard(0.3)
    return gate


def _calls(step: int, pressure: float) -> np.ndarray:
    block = np.zeros(1, MEASUREMENT)
    block["n_ranks"], block["n_nodes"] = BOXES.n_ranks, BOXES.n_nodes
    block["algorithm"], block["protocol"], block["n_channels"] = Algorithm.ring, Protocol.simple, 8
    block["step"], block["memory_pressure"] = step, pressure
    return block


def test_the_fullest_device_counts() -> None:
    """As calls last told it: they tell of all ranks, steps of the first."""
    gate = _gate()
    gate.ran(_calls(1, 0.95))
    gate.heard(0.5)
    assert gate.is_short
    assert gate.pressure == pytest.approx(0.95)
    gate.ran(_calls(2, np.nan))
    gate.heard(0.4)
    assert gate.is_short
    gate.ran(_calls(3, 0.8))
    gate.heard(0.4)
    assert gate.pressure == pytest.approx(0.8)
    assert gate.is_falling
