"""Virtual times of real processes: hand-computed arithmetic, agreement among ranks, determinism, plans."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from emulated_world import World, join

from zerotune.agent.nccl import catalog, library
from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.nccl.emulated import journal, settings
from zerotune.agent.nccl.emulated.device import clock
from zerotune.agent.nccl.emulated.host import communicator
from zerotune.store.records import (
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    Plan,
    PlanRow,
    Protocol,
    TimingSource,
)
from zerotune.store.wire import FLAG_TIMED

MIB = 1 << 20


@pytest.fixture(scope="module")
def quiet_fabric(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Ethernet boxes without noise."""
    text = (fabrics.FABRICS_DIR / "ethernet_boxes.toml").read_text()
    text = text.replace("sigma = 0.03", "sigma = 0.0").replace("arrival_skew_us = 3.0", "arrival_skew_us = 0.0")
    path = tmp_path_factory.mktemp("fabric") / "quiet.toml"
    path.write_text(text)
    return str(path)


def _begin(rank: int, fabric: str, seed: int, folder: str, name: str) -> fabrics.Fabric:
    """A new default group on another fabric, with the clock at 0."""
    dist.destroy_process_group()
    os.environ.update(ZEROTUNE_FABRIC=fabric, ZEROTUNE_SEED=str(seed))
    settings.emulation.cache_clear()
    communicator.incarnations.clear()
    clock.reset()
    journal().clear()
    journal().keep_calls = True
    join(folder, rank, 4, name)
    return settings.emulation().fabric


def _overlapped(rank: int, fabric: str, folder: str) -> Any:
    _begin(rank, fabric, 0, folder, "overlapped")
    clock.mark_compute_us(100.0 * (rank + 1))
    work = dist.all_reduce(torch.ones(MIB), async_op=True)
    clock.mark_compute_us(50.0)
    following = dist.all_reduce(torch.ones(MIB), async_op=True)
    before_us = clock.now_us()
    work.wait()
    following.wait()
    calls = [(call.start_us, call.end_us, call.candidate) for call in journal().calls]
    return before_us, clock.now_us(), clock.exposed_us(), calls


def test_overlap_and_exposure_are_as_computed_by_hand(world: World, quiet_fabric: str, tmp_path: Path) -> None:
    fabric = fabrics.load(quiet_fabric)
    shape = CommunicatorClass(4, 4)
    results = world.run(_overlapped, quiet_fabric, str(tmp_path))
    candidate = results[0][3][0][2]
    duration_us = fabric.truth_us(
        shape, Collective.all_reduce, candidate.algorithm, candidate.protocol, candidate.n_channels, 4 * MIB
    )
    assert duration_us > 500  # all ranks still compute inside the first call
    slowdown = fabric.sms_slowdown(candidate.n_channels)
    end_us = 400 + 2 * duration_us  # the last rank arrives at 400; the second call starts as the first ends
    for rank, (before_us, now_us, exposed_us, calls) in enumerate(results):
        assert before_us == pytest.approx(100 * (rank + 1) + 50 * slowdown)
        assert now_us == pytest.approx(end_us)
        assert exposed_us == pytest.approx(end_us - before_us)
        assert calls == [
            (pytest.approx(400), pytest.approx(400 + duration_us), candidate),
            (pytest.approx(400 + duration_us), pytest.approx(end_us), candidate),
        ]


def _two_communicators(rank: int, fabric: str, folder: str) -> Any:
    _begin(rank, fabric, 0, folder, "sharing")
    other = dist.new_group()
    first = dist.all_reduce(torch.ones(MIB), async_op=True)
    second = dist.all_reduce(torch.ones(MIB // 2), group=other, async_op=True)
    first.wait(), second.wait()
    return [(call.start_us, call.end_us, call.candidate, call.message_bytes) for call in journal().calls]


def test_overlapping_communicators_share_the_links(world: World, quiet_fabric: str, tmp_path: Path) -> None:
    fabric = fabrics.load(quiet_fabric)
    for calls in world.run(_two_communicators, quiet_fabric, str(tmp_path)):
        for (start_us, end_us, candidate, message_bytes), factor in zip(calls, (1, 2), strict=True):
            alone_us = fabric.truth_us(
                CommunicatorClass(4, 4), Collective.all_reduce, candidate.algorithm, candidate.protocol,
                candidate.n_channels, message_bytes,
            )  # fmt: skip
            assert start_us == 0
            assert end_us == pytest.approx(alone_us * factor)


def _program(rank: int, seed: int, folder: str, name: str) -> Any:
    _begin(rank, "ethernet_boxes", seed, folder, name)
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    for _ in range(3):
        clock.mark_compute_us(40.0)
        work = dist.all_gather_into_tensor(torch.empty(4 * 1000), torch.ones(1000), async_op=True)
        dist.all_reduce(torch.ones(5000), group=half)
        clock.mark_compute_us(10.0)
        work.wait()
        model(torch.ones(2, 64)).sum().backward()
    calls = [(c.comm_id, c.sequence, c.candidate, c.start_us, c.end_us) for c in journal().calls]
    return clock.now_us(), clock.exposed_us(), calls


def test_one_seed_gives_the_same_figures_again_and_on_all_ranks(world: World, tmp_path: Path) -> None:
    first = world.run(_program, 5, str(tmp_path), "one")
    second = world.run(_program, 5, str(tmp_path), "two")
    other = world.run(_program, 6, str(tmp_path), "three")
    for (now_us, exposed_us, calls), again in zip(first, second, strict=True):
        assert (now_us, exposed_us, sorted(calls)) == (again[0], again[1], sorted(again[2]))
    assert first[0][0] != other[0][0]
    shared: dict[Any, Any] = {}
    for _, _, calls in first:
        for comm_id, sequence, *figures in calls:
            assert shared.setdefault((comm_id, sequence), figures) == figures


SHAPE = CommunicatorClass(4, 4)
SLOW, BY_PAT = Candidate(Algorithm.tree, Protocol.ll, 2), Candidate(Algorithm.pat, Protocol.simple, 2)


def _planned(rank: int, folder: str) -> Any:
    _begin(rank, "ethernet_boxes", 1, folder, "planned")
    plugin = library.load()
    plugin.reset()
    rows = tuple(
        PlanRow(SHAPE, collective, Phase.other, MIB, 8 * MIB, candidate)
        for collective, candidate in (
            (Collective.all_reduce, SLOW),
            (Collective.reduce_scatter, BY_PAT),
        )
    )
    try:
        plugin.load_plan(Plan(epoch=1, rows=rows))
        assert plugin.flip(1)
        plugin.set_observing(True)
        dist.all_reduce(torch.ones(MIB))
        dist.all_reduce(torch.ones(MIB // 8))  # outside the row's range
        dist.reduce_scatter_tensor(torch.empty(MIB // 4), torch.ones(MIB))
        dist.reduce_scatter_tensor(torch.empty(MIB // 4), torch.ones(MIB), op=dist.ReduceOp.AVG)
        records = plugin.drain()
        records = records[records["flags"] & FLAG_TIMED != 0]
    finally:
        plugin.set_observing(False)
        plugin.reset()
    release = dist.group.WORLD.communicator.release
    return [call.candidate for call in journal().calls], list(journal().calls), records, release.version


def test_a_plan_decides_what_runs_and_the_profiler_reports_it(world: World, tmp_path: Path) -> None:
    results = world.run(_planned, str(tmp_path))
    for ran, calls, records, version in results:
        assert ran[0] == SLOW
        assert ran[1] != SLOW
        assert ran[2] == BY_PAT
        assert (ran[3].algorithm is Algorithm.pat) == (version >= catalog.PAT_AVERAGES_SINCE)
        assert len(set(records["comm_id"])) == 1
        assert set(records["timing_source"]) == {TimingSource.emulated}
        for call, record in zip(calls, records, strict=True):
            assert record["message_bytes"] == call.message_bytes
            assert (record["algorithm"], record["protocol"], record["n_channels"]) == (
                call.candidate.algorithm, call.candidate.protocol, call.candidate.n_channels,
            )  # fmt: skip
            end_us = record["start_ns"] / 1000 + record["duration_us"]
            assert end_us == pytest.approx(call.end_us, abs=0.01, rel=1e-6)
    # Each rank's kernel spins from its own arrival on; the last to arrive sees the collective's own duration.
    durations = np.array([records["duration_us"] for _, _, records, _ in results])
    own = [call.end_us - call.start_us for call in results[0][1]]
    assert durations.min(axis=0) == pytest.approx(own, rel=1e-3)
