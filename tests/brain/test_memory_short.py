"""What runs while memory is short: only what has run already, and of that whatever is fastest."""

from __future__ import annotations

import copy
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import (
    Call,
    OverlappedWorld,
    World,
    decided,
    gain_share,
    make_brain,
    play,
    zero3_step,
)
from benchmarks.lib.simulated.earlier_jobs import knowledge, lines, offer_only
from benchmarks.lib.simulated.tight_world import TightWorld
from zerotune.agent.nccl import fabric
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
from zerotune.tuner.learning.policy.observations import HORIZON_STEPS

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
def test_a_job_that_begins_in_short_memory_connects_no_earlier_winner(latency_steps: int) -> None:
    world = _device_for_one_algorithm()
    play(world, make_brain(world, _says_another_algorithm(world)), 40, latency_steps=latency_steps)
    assert set(world.connected) == {Algorithm.pat}
    assert world.memory_pressure > 0.92


@pytest.mark.parametrize("is_proven", [True, False])
def test_no_winner_is_connected_that_would_make_memory_short(is_proven: bool) -> None:
    world = _device_for_one_algorithm(device_mb=1.1)  # 0.91, until another is connected
    play(world, make_brain(world, _says_another_algorithm(world, is_proven=is_proven)), 40)
    assert set(world.connected) == {Algorithm.pat}
    roomy = _device_for_one_algorithm(device_mb=3.0)
    play(roomy, make_brain(roomy, _says_another_algorithm(roomy, is_proven=is_proven)), 40)
    assert set(roomy.connected) > {Algorithm.pat}


def test_communicators_that_come_later_connect_nothing_in_short_memory() -> None:
    world = World("ethernet_boxes", BOXES, zero3_step(shard_bytes=MIB, n_ranks=1), memory_pressure=0.97)
    world.communicator = CommunicatorClass(4, 4)
    brain = make_brain(world, _says_another_algorithm(world))
    world.communicator = BOXES
    play(world, brain, 3)
    world.communicator = CommunicatorClass(4, 4)
    brain.observe(world.run_step()[0])  # the daemon may think before it hears how full the device is by now
    new = [one for one in brain.keys if one.key.communicator != BOXES]
    assert new
    assert all(state.trial is None for state in new)


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


@pytest.mark.parametrize(("pressure", "n_begun"), [(0.5, 1), (0.4, 2)])
def test_trials_of_one_window_must_fit_together(pressure: float, n_begun: int) -> None:
    """Tree takes 0.127 of the device, PAT 0.339."""
    reduces, gathers = (
        Call(one, Phase.other, 4 * MIB) for one in (Collective.all_reduce, Collective.all_gather)
    )
    world = World("ethernet_boxes", BOXES, [reduces, gathers] * 2, memory_pressure=pressure)
    _device(world, 1700.0)
    brain = make_brain(world, knowledge(world, promising={(reduces, TREE): 0.3, (gathers, PAT): 0.3}))
    offer_only(world, brain, TREE, PAT)
    while not (on_trial := [one.trial for one in brain.keys if one.trial is not None]):
        assert world.step < 60
        play(world, brain, 1)
    assert len(on_trial) == n_begun


def _device(world: World, device_mb: float) -> None:
    """Give a job another device."""
    world.fabric = copy.copy(world.fabric)
    world.fabric.memory = msgspec.structs.replace(world.fabric.memory, device_mb=device_mb)


@pytest.mark.parametrize(("n_channels", "stays"), [(4, True), (8, False)])
@pytest.mark.parametrize("kind", ["promising", "provisional"])
def test_a_trial_that_adds_channels_ends_as_memory_gets_short(kind: str, n_channels: int, stays: bool) -> None:
    call = Call(Collective.all_gather, Phase.forward_gather, 1 << 18)
    world = World("h100_ib_2", CommunicatorClass(16, 2), [call] * 3)
    usual = world.setting(call, BASELINE)
    assert usual.n_channels == 4
    asked = Candidate(usual.algorithm, Protocol.ll128, n_channels)
    brain = make_brain(world, knowledge(world, **{kind: {(call, asked): 0.05}}))
    offer_only(world, brain, asked)
    world.factors[call, asked] = 0.97 * world.truth(call, BASELINE)[0] / world.truth(call, asked)[0]
    play(world, brain, 1)
    while asked not in (brain.keys[0].trial, brain.keys[0].provisional):
        assert world.step < 60
        play(world, brain, 1)
    _, record = world.run_step()
    brain.step_finished(msgspec.structs.replace(record, memory_pressure=0.99))
    assert (asked in (brain.keys[0].trial, brain.keys[0].provisional)) == stays


SHORT_FOR_GOOD = {
    "few_sms_node": CommunicatorClass(8, 1),
    "h100_ib_2": CommunicatorClass(16, 2),
    "h100_node": CommunicatorClass(8, 1),
}


@pytest.mark.parametrize("name", SHORT_FOR_GOOD)
def test_the_gain_is_had_though_memory_is_short_throughout(name: str) -> None:
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


def test_fewer_channels_are_found_to_train_faster_while_memory_is_short_too() -> None:
    place = fabric.load("few_sms_node").communicator(range(8))
    kinds = [(Collective.all_gather, Phase.backward_gather), (Collective.reduce_scatter, Phase.gradient_scatter)]
    calls = [Call(kind, phase, 1 << exponent) for exponent in (22, 24, 26) for kind, phase in kinds for _ in range(3)]
    found = []
    for pressure in (0.3, 0.97):
        world = OverlappedWorld("few_sms_node", place, calls, compute_us=30_000.0, memory_pressure=pressure)
        brain = make_brain(world)
        play(world, brain, 350)
        world.fixed = decided(brain)
        found.append(float(np.median([world.run_step()[1].duration_us for _ in range(20)])))
    assert found[1] < 1.01 * found[0]


@pytest.mark.parametrize("becomes_short", [False, True])
def test_a_variant_that_would_connect_something_ends_when_memory_becomes_short(becomes_short: bool) -> None:
    """Nothing but a tree of few channels is offered, whose calls are slower: only steps may speak for it."""
    place = fabric.load("few_sms_node").communicator(range(8))
    call = Call(Collective.all_reduce, Phase.gradient_scatter, 1 << 24)
    world = OverlappedWorld("few_sms_node", place, [call] * 6, compute_us=30_000.0)
    tree = Candidate(Algorithm.tree, Protocol.simple, 16)
    slower = Knowledge(lines(world, {(call, tree): -0.3}))
    brain = make_brain(world, slower)
    offer_only(world, brain, tree)
    while brain.variant is None:
        assert world.step < 200
        play(world, brain, 1)
    assert {*brain.variant.settings.values()} == {tree}
    assert Algorithm.tree not in brain.memory.connected[place]
    world.memory_pressure = 0.97 if becomes_short else 0.3
    plans = play(world, brain, 20)
    assert (tree in {row.candidate for plan in plans for row in plan.rows}) == (not becomes_short)
    assert not (becomes_short and brain.variant)


# ---- the gate ----


def _gate(**facts: float) -> MemoryGate:
    gate = MemoryGate(0.92, {"device_mb": 1000.0, "channel_mb": 9.0, **facts})
    gate.ran(_calls(0, 0.3))
    gate.take_reading(0.3)
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
    gate.take_reading(0.5)
    assert gate.is_short
    assert gate.pressure == pytest.approx(0.95)
    gate.ran(_calls(2, np.nan))
    gate.take_reading(0.4)
    assert gate.is_short
    gate.ran(_calls(3, 0.8))
    gate.take_reading(0.4)
    assert gate.pressure == pytest.approx(0.8)
    assert gate.is_falling


def _ran(communicator: CommunicatorClass, *settings: Candidate) -> np.ndarray:
    block = np.zeros(len(settings), MEASUREMENT)
    block["n_ranks"], block["n_nodes"] = communicator.n_ranks, communicator.n_nodes
    for row, setting in zip(block, settings, strict=True):
        row["algorithm"], row["protocol"], row["n_channels"] = setting.algorithm, setting.protocol, setting.n_channels
    return block


def test_connections_are_known_for_each_communicator_class() -> None:
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


def test_a_setting_that_would_fill_the_device_is_not_tried() -> None:
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


def test_memory_is_short_above_the_threshold_until_it_has_fallen() -> None:
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


def test_a_setting_that_fits_alone_waits_for_a_promised_one() -> None:
    gate = _gate()
    gate.take_reading(0.5)  # tree takes 0.216, PAT 0.576
    assert gate.allows(TREE, BOXES)
    gate = _gate(device_mb=1700.0)  # 0.127 and 0.339
    gate.take_reading(0.5)
    assert gate.allows(TREE, BOXES)
    assert gate.allows(PAT, BOXES)
    gate.promise(TREE, BOXES)
    assert gate.allows(TREE, BOXES)
    assert not gate.allows(PAT, BOXES)
    for _ in range(HORIZON_STEPS):
        gate.take_reading(0.5)
    assert gate.allows(PAT, BOXES), "the trial ended before it ran"
    gate.promise(TREE, BOXES)
    connected = _calls(200, 0.5)
    connected["algorithm"] = Algorithm.tree
    gate.ran(connected)
    assert gate.allows(PAT, BOXES), "the pressure tells by now"
