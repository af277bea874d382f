"""Chunk sizes that a sweep measured are settings like any other, where NCCL asks for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks.lib.simulated.brain_world import Call, World, make_brain, play
from zerotune.agent.nccl.fabric_file import ChunkEffect
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass, Phase, Plan, Protocol, Source
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.learning.brain import BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.offline.export import export_plan

PLACE = CommunicatorClass(16, 16)
GATHER = Call(Collective.all_gather, Phase.forward_gather, 1 << 23)
SIZES = (1 << 16, 1 << 19)
EFFECT = ChunkEffect("simple", ((SIZES[0], 0.7), (SIZES[1], 2.0)))
ASKS = BrainSettings(chunk_sizes=True)


@dataclass
class Chunked(World):
    """What is asked for in small chunks takes 0.7 times as long, in large ones twice as long."""

    asks: bool = True

    def truth(self, call: Call, candidate: Candidate) -> tuple[float, Candidate]:
        us, ran = super().truth(call, candidate)
        if not self.asks:
            return us, ran
        ran = msgspec.structs.replace(ran, chunk_bytes=candidate.chunk_bytes)
        return us * EFFECT.us_factor(self.communicator, ran), ran


def world_of(seed: int = 0, *, asks: bool = True) -> Chunked:
    return Chunked("ethernet_boxes", PLACE, [GATHER] * 6, seed=seed, asks=asks, compute_us=200_000.0)


def rows_of_a_sweep(chunk_sizes: tuple[int, ...]) -> np.ndarray:
    world, noise = world_of(), np.random.default_rng(5)
    plain = [*make_brain(world).costs.candidates(PLACE, GATHER.collective)]
    chunked = [msgspec.structs.replace(one, chunk_bytes=size) for one in plain[1:] for size in chunk_sizes]
    rows = np.zeros((len(plain) + len(chunked), 8), MEASUREMENT)
    rows["n_ranks"], rows["n_nodes"], rows["message_bytes"] = 16, 16, GATHER.message_bytes
    rows["collective"], rows["source"], rows["memory_pressure"] = GATHER.collective, Source.sweep, math.nan
    for row, candidate in zip(rows, [*plain, *chunked], strict=True):
        us, ran = world.truth(GATHER, candidate)
        row["duration_us"] = us * np.exp(noise.normal(0.0, 0.02, 8))
        row["algorithm"], row["protocol"], row["n_channels"] = ran.algorithm, ran.protocol, ran.n_channels
        row["chunk_bytes"], row["is_default"] = ran.chunk_bytes, candidate == BASELINE
    return rows.reshape(-1)


def knowledge_of(path: Path, chunk_sizes: tuple[int, ...]) -> Knowledge:
    with Store.open(path) as store:
        store.record_measurements("f", "sweep", rows_of_a_sweep(chunk_sizes))
        store.flush()
        return Knowledge.from_store(store, "f")


@pytest.fixture
def knowledge(tmp_path: Path) -> Knowledge:
    return knowledge_of(tmp_path / "s.db", SIZES)


def names_chunks(plans: list[Plan]) -> bool:
    rows = [row for plan in plans for row in (*plan.rows, *(row for stage in plan.then for row in stage.rows))]
    return any(row.candidate.chunk_bytes for row in rows)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_one_is_found_and_kept(knowledge: Knowledge, tmp_path: Path, seed: int) -> None:
    world = world_of(seed)
    brain = make_brain(world, knowledge, ASKS)
    plans = play(world, brain, 120)
    (state,) = brain.keys
    assert state.incumbent.chunk_bytes == SIZES[0]
    candidates = [*brain.costs.candidates(PLACE, GATHER.collective)]
    best_us = 0.7 * min(world.truth(GATHER, one)[0] for one in candidates if one.protocol is Protocol.simple)
    assert world.truth(GATHER, state.incumbent)[0] < 1.05 * best_us
    assert names_chunks(plans)
    assert names_chunks([plans[-1]])
    path = tmp_path / "job.db"
    with Store.open(path) as store:
        store.record_job("job", world.fabric.fabric_id, {}, 16)
        store.record_decisions(brain.decisions())
        store.flush()
        assert {one.candidate for one in store.decisions() if one.kind == "promote"} == {state.incumbent}
    export_plan(path, tmp_path / "plan.json")
    assert f'"chunk_bytes": {SIZES[0]}' in (tmp_path / "plan.json").read_text()


def test_larger_ones_that_were_measured_to_be_slow_are_not_tried(knowledge: Knowledge) -> None:
    world = world_of()
    brain = make_brain(world, knowledge, ASKS)
    play(world, brain, 120)
    tried = {one.candidate for one in brain.decisions() if one.kind == "explore"}
    assert {one.chunk_bytes for one in tried} <= {0, SIZES[0]}


def test_nothing_changes_without_both(knowledge: Knowledge, tmp_path: Path) -> None:
    """Without what was measured, and without being asked by NCCL: the same plans to the bit."""
    plain = knowledge_of(tmp_path / "plain.db", ())
    played = []
    for known, settings in ((plain, BrainSettings()), (plain, ASKS), (knowledge, BrainSettings())):
        world = world_of()
        played.append(msgspec.msgpack.encode(play(world, make_brain(world, known, settings), 120)))
    assert len(set(played)) == 1
    assert not names_chunks(msgspec.msgpack.decode(played[0], type=list[Plan]))


def test_chunk_sizes_that_nccl_ignores_are_not_learned(knowledge: Knowledge) -> None:
    world = world_of(asks=False)
    brain = make_brain(world, knowledge, ASKS)
    play(world, brain, 120)
    (state,) = brain._states
    assert not state.usual.chunk_bytes
    chunked = [one for one in state.banned if one.chunk_bytes]
    assert chunked
    assert {state.banned[one] for one in chunked} == {"NCCL runs it with its own chunk size"}
    evidence = brain._regimes.evidence
    measured = evidence.n_calls[: len(evidence)] > 0
    assert not evidence.chunk_bytes[: len(evidence)][measured].any()
