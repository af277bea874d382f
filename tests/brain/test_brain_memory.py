"""A device that is nearly full: what would not fit is not connected, and what comes after is prepared."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play, zero3_step
from benchmarks.lib.simulated.tight_world import OutOfMemory, TightWorld
from zerotune.agent.nccl import cost_model, library
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    Plan,
    PlanRow,
    Protocol,
    size_class,
    size_class_range,
)
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.learning.policy.memory import MemoryGate

MIB = 1 << 20
KIB = 1 << 10


def _zero3(n_bytes: int) -> list[Call]:
    return zero3_step(shard_bytes=n_bytes, n_ranks=1)


def _ddp(n_bytes: int) -> list[Call]:
    return [Call(Collective.all_reduce, Phase.gradient_scatter, n_bytes)] * 6


SMALL_THEN_LARGE = {
    # The algorithm that NCCL takes for small messages is not the one it takes for large ones.
    "pat_then_ring": ("ethernet_boxes", CommunicatorClass(16, 16), _zero3, MIB, 8 * MIB),
    "tree_then_ring": ("ethernet_boxes", CommunicatorClass(4, 4), _ddp, 4 * KIB, 64 * KIB),
    "tree_then_ring_ib": ("h100_ib_2", CommunicatorClass(16, 2), _ddp, 4 * MIB, 64 * MIB),
    "ring_then_nvls": ("h100_node", CommunicatorClass(8, 1), _ddp, MIB, 4 * MIB),
}
NOTHING_AS_FAST = ("rtx5090_loopback", CommunicatorClass(4, 4), _zero3, 8 * KIB, 64 * KIB)
"""Ring for small messages, and for large ones PAT, which is a third faster than anything that is connected."""

Scenario = tuple[str, CommunicatorClass, Callable[[int], list[Call]], int, int]


def _run(
    scenario: Scenario, free_mb: float, *, tuned: bool, connects: str = "all_channels"
) -> tuple[TightWorld, list[float]]:
    """Microseconds of the steps with large messages; small ones come before."""
    fabric, communicator, step, small, large = scenario
    world = TightWorld(fabric, communicator, step(small), free_mb=free_mb, connects=connects)
    brain = make_brain(world) if tuned else None
    durations: list[float] = []
    for n_bytes in (small, large):
        world.calls = step(n_bytes)
        durations = []
        for _ in range(60):
            block, record = world.run_step()
            durations.append(record.duration_us)
            if brain is not None:
                brain.observe(block)
                brain.step_finished(record)
                world.follow(brain.propose(), brain)
    return world, durations


def _small_only(scenario: Scenario, connects: str = "all_channels") -> TightWorld:
    fabric, communicator, step, small, _ = scenario
    world = TightWorld(fabric, communicator, step(small), connects=connects)
    world.run_step()
    return world


def _slowdown_without_room(scenario: Scenario) -> float:
    """Tuned steps over NCCL's own with all memory it wants; without the tuner the job must not even complete."""
    roomy, default_us = _run(scenario, float("inf"), tuned=False)
    free_mb = 0.5 * (_small_only(scenario).taken_mb + roomy.taken_mb)  # room for what comes first, not for the rest
    with pytest.raises(OutOfMemory):
        _run(scenario, free_mb, tuned=False)
    tight, tuned_us = _run(scenario, free_mb, tuned=True)
    assert tight.memory_pressure > 0.92
    return float(np.median(tuned_us) / np.median(default_us)) - 1.0


@pytest.mark.parametrize("name", SMALL_THEN_LARGE)
def test_a_job_that_would_run_out_of_memory_completes_at_next_to_no_cost(name: str) -> None:
    assert _slowdown_without_room(SMALL_THEN_LARGE[name]) <= 0.02


def test_it_completes_also_where_nothing_connected_is_as_fast() -> None:
    assert 0.1 < _slowdown_without_room(NOTHING_AS_FAST) < 0.5


def test_where_channels_cost_memory_too_no_more_are_opened() -> None:
    """Not NCCL's way, which opens all at once, but a library's that connects what it uses."""
    scenario, connects = SMALL_THEN_LARGE["tree_then_ring"], "used_channels"
    roomy, default_us = _run(scenario, float("inf"), tuned=False, connects=connects)
    small = _small_only(scenario, connects)
    assert sum(small.connected.values()) < sum(roomy.connected.values())
    tight, tuned_us = _run(scenario, small.taken_mb + 1.0, tuned=True, connects=connects)
    assert tight.connected == small.connected
    assert np.median(tuned_us) <= 1.02 * np.median(default_us)


def test_larger_messages_are_expected_when_pressure_drops() -> None:
    world = World("ethernet_boxes", CommunicatorClass(16, 16), _zero3(MIB), memory_pressure=0.97)
    brain = make_brain(world)
    play(world, brain, 40)
    world.memory_pressure = 0.6
    play(world, brain, 3)
    # The plan that the ranks hold now, before anybody has sent anything larger.
    upcoming = size_class(MIB) + 1
    for collective in {call.collective for call in world.calls}:
        row = _row_for(world.plan.rows, world, collective, size_class_range(upcoming)[0])
        assert row is not None
    world.calls = _zero3(size_class_range(upcoming)[0])
    first = world.calls[0]
    asked = world.chosen(first)
    block, record = world.run_step()
    brain.observe(block)
    brain.step_finished(record)
    # What was measured is the setting's, not the baseline's.
    state = next(one for one in brain.keys if one.key.size_class == upcoming and one.key.phase is first.phase)
    assert brain.predicted(state.key)[asked].n_calls == sum(call == first for call in world.calls)
    if not asked.is_baseline:
        assert state.provisional == asked
        assert state.provisional_is_proven


def test_nothing_is_anticipated_while_memory_never_was_short() -> None:
    world = World("ethernet_boxes", CommunicatorClass(16, 16), _zero3(MIB), memory_pressure=0.5)
    brain = make_brain(world)
    for plan in play(world, brain, 60):
        assert all(row.min_bytes <= MIB <= row.max_bytes for row in plan.rows)


def test_what_ran_at_a_size_in_another_phase_connects_nothing_either() -> None:
    world = World("ethernet_boxes", CommunicatorClass(16, 16), _zero3(MIB), memory_pressure=0.97)
    brain = make_brain(world)
    play(world, brain, 20)
    world.calls = [call for call in _zero3(8 * MIB) if call.phase is Phase.forward_gather]
    play(world, brain, 10)
    world.calls = _zero3(8 * MIB)
    for _ in range(20):
        assert {world.chosen(call).algorithm for call in world.calls} == {Algorithm.pat}  # NCCL would take ring
        play(world, brain, 1)


def test_new_sizes_keep_their_guarded_setting_until_memory_is_free() -> None:
    world = World("ethernet_boxes", CommunicatorClass(16, 16), _zero3(MIB), memory_pressure=0.97)
    brain = make_brain(world)
    play(world, brain, 20)
    world.calls = _zero3(8 * MIB)
    for _ in range(40):
        settings = {world.chosen(call).algorithm for call in world.calls}
        assert settings == {Algorithm.pat}  # NCCL would take ring
        play(world, brain, 1)
    world.memory_pressure = 0.5
    play(world, brain, 150)
    assert len({row.candidate.algorithm for row in world.plan.rows}) >= 1
    assert not [row for row in world.plan.rows if row.max_bytes > 64 * MIB]


def test_exploration_fills_no_device() -> None:
    """With room for what NCCL connects by itself and no more, below the threshold: nothing else is tried."""
    scenario = ("ethernet_boxes", CommunicatorClass(4, 4), _ddp, 64 * KIB, 64 * KIB)
    taken_mb = _small_only(scenario).taken_mb
    world = TightWorld(*scenario[:2], _ddp(64 * KIB), free_mb=1.1 * taken_mb)
    world.fabric = copy.copy(world.fabric)
    world.fabric.memory = msgspec.structs.replace(world.fabric.memory, device_mb=1.1 * taken_mb)
    play(world, make_brain(world), 120)
    assert world.memory_pressure < 0.92
    assert set(world.connected) == {Algorithm.ring}


# ---- the gate ----


def _ran(communicator: CommunicatorClass, *settings: Candidate) -> np.ndarray:
    block = np.zeros(len(settings), MEASUREMENT)
    block["n_ranks"], block["n_nodes"] = communicator.n_ranks, communicator.n_nodes
    for row, setting in zip(block, settings, strict=True):
        row["algorithm"], row["protocol"], row["n_channels"] = setting.algorithm, setting.protocol, setting.n_channels
    return block


def test_what_is_connected_is_known_per_communicator() -> None:
    wide, narrow = CommunicatorClass(16, 2), CommunicatorClass(8, 1)
    gate = MemoryGate(0.92)
    gate.ran(_ran(wide, Candidate(Algorithm.ring, Protocol.ll, 4), Candidate(Algorithm.ring, Protocol.simple, 2)))
    gate.ran(_ran(narrow, Candidate(Algorithm.tree, Protocol.ll, 1)))
    assert gate.has_room_for(Candidate(Algorithm.ring, Protocol.simple, 4), wide)
    assert not gate.has_room_for(Candidate(Algorithm.ring, Protocol.simple, 5), wide)
    assert not gate.has_room_for(Candidate(Algorithm.ring, Protocol.simple, 1), narrow)
    assert not gate.has_room_for(BASELINE, wide)
    assert gate.allows(Candidate(Algorithm.ring, Protocol.ll, 5), wide)
    gate.take_reading(0.95)
    assert gate.allows(Candidate(Algorithm.tree, Protocol.ll, 1), narrow)
    assert not gate.allows(Candidate(Algorithm.tree, Protocol.ll, 1), wide)
    assert gate.allows(Candidate(Algorithm.ring, Protocol.ll, 4), wide)
    assert not gate.allows(Candidate(Algorithm.ring, Protocol.ll, 5), wide)


def test_what_would_fill_the_device_is_not_tried_while_it_is_not_full_yet() -> None:
    boxes = CommunicatorClass(4, 4)
    gate = MemoryGate(0.92, {"device_mb": 1000.0, "channel_mb": 9.0})
    gate.ran(_ran(boxes, Candidate(Algorithm.ring, Protocol.ll, 8)))
    tree = Candidate(Algorithm.tree, Protocol.ll, 1)  # 8 channels, 3 neighbours: 216 MB
    for pressure, fits in ((0.6, True), (0.8, False), (0.6, True)):
        gate.take_reading(pressure)
        assert gate.allows(tree, boxes) == fits
        assert gate.allows(Candidate(Algorithm.ring, Protocol.simple, 8), boxes)
    by_nccls_arithmetic = MemoryGate(0.92, {"device_mb": 80_000.0})
    by_nccls_arithmetic.take_reading(0.91)
    assert not by_nccls_arithmetic.allows(tree, boxes)  # 16 channels of 56 MB
    unknown = MemoryGate(0.92, {})
    unknown.take_reading(0.91)
    assert unknown.allows(tree, boxes)


def test_memory_is_short_above_the_threshold_and_falls_where_it_matters() -> None:
    gate = MemoryGate(0.92)
    seen = []
    for pressure in (0.5, 0.93, 0.91, 0.93, 0.89, 0.85, 0.82, 0.7, 0.95, 0.95, 0.5):
        gate.take_reading(pressure)
        seen.append((gate.is_short, gate.is_falling))
    short, free, quiet = (True, False), (False, True), (False, False)
    assert seen == [quiet, short, short, short, quiet, quiet, free, free, short, short, free]
    gradual = MemoryGate(0.92)
    for pressure in (0.8, 0.75, 0.72):
        gradual.take_reading(pressure)
        assert not gradual.is_falling
    gradual.take_reading(0.6)
    assert gradual.is_falling


def _row_for(rows: tuple[PlanRow, ...], world: World, collective: Collective, n_bytes: int) -> PlanRow | None:
    """The one for calls whose phase is not known."""
    place = world.communicator, collective, None
    there = (row for row in rows if row.min_bytes <= n_bytes <= row.max_bytes)
    return {(row.communicator, row.collective, row.phase): row for row in there}.get(place)


def test_rows_ahead_are_disjoint_and_fit_the_plugins_table() -> None:
    world = World("h100_node", CommunicatorClass(8, 1), [*_zero3(MIB), *_zero3(3 * MIB), *_ddp(5000)])
    world.memory_pressure = 0.97
    brain = make_brain(world)
    play(world, brain, 10)
    assert any(row.min_bytes > 3 * MIB for row in world.plan.rows)
    plugin = library.load()
    plugin.reset()
    plugin.load_plan(Plan(1, world.plan.rows))  # refuses what overlaps or is illegal
    for n_bytes in (16, 4096, 2 * MIB, 64 * MIB, 1 << 34):
        default = cost_model.default_choice(world.topology, Collective.all_gather, n_bytes)
        row = _row_for(world.plan.rows, world, Collective.all_gather, n_bytes)
        assert row is not None
        assert row.candidate.algorithm is Algorithm.ring, default
    plugin.reset()
