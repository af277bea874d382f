"""What the emulated NCCL notices where the real one would hang, and what it tells every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_world import World

from zerotune.agent.nccl import library
from zerotune.agent.nccl.emulated import (
    CallMismatch,
    CollectiveTimeout,
    DeviceOutOfMemory,
    EmulatedNcclError,
    SettingDisagreement,
    faults,
    journal,
)
from zerotune.agent.nccl.emulated.device.memory import device
from zerotune.store.errors import RankDisagreement
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol

_broken: list[Any] = []


@pytest.fixture
def world(world: World) -> Iterator[World]:
    """Groups that broke are given up after each test."""
    yield world
    world.run(_give_up)


def _give_up(rank: int) -> None:
    while _broken:
        dist.destroy_process_group(_broken.pop())


def _outcome(group: Any, call: Any) -> tuple[str, str, float]:
    """Type and text of what `call` raises on this rank, and after how many seconds."""
    began_s = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began_s
    finally:
        faults.configure("")
        _broken.append(group)  # left alone: the other ranks are to find out by themselves
    return "none", "", time.monotonic() - began_s


def _disagree(rank: int) -> Any:
    group = dist.new_group()
    dist.all_reduce(torch.ones(1 << 12), group=group)
    faults.configure("force:2:ring/ll/3")
    before = journal().n_disagreements

    def twice() -> None:
        work = dist.all_reduce(torch.ones(1 << 20), group=group, async_op=True)
        try:
            work.wait()
        except RankDisagreement as error:
            try:
                dist.all_reduce(torch.ones(4), group=group)
            except EmulatedNcclError as later:
                raise error from later

    return (*_outcome(group, twice), journal().n_disagreements - before)


def test_all_ranks_see_a_disagreement_within_a_second(world: World) -> None:
    for kind, text, seconds, n_disagreements in world.run(_disagree):
        assert kind == SettingDisagreement.__name__
        assert "rank 2 runs ring/ll/3ch" in text
        assert seconds < 1
        assert n_disagreements == 1


def _forced_apart(rank: int, first: Candidate, second: Candidate) -> Any:
    """Plans that no agreement let through: even ranks run one setting, odd ranks another."""
    group = dist.new_group()
    dist.all_reduce(torch.ones(1 << 20), group=group)
    plugin = library.load()
    plugin.reset()
    row = PlanRow(
        CommunicatorClass(4, 4), Collective.all_reduce, Phase.other, 1, 1 << 30, first if rank % 2 == 0 else second
    )
    try:
        plugin.load_plan(Plan(epoch=1, rows=(row,)))
        assert plugin.flip(1)
        return _outcome(group, lambda: dist.all_reduce(torch.ones(1 << 20), group=group))
    finally:
        plugin.reset()


@pytest.mark.parametrize("cell", [(Algorithm.ring, Protocol.ll), (Algorithm.tree, Protocol.simple)])
def test_ranks_that_plans_force_apart_are_caught(world: World, cell: tuple[Algorithm, Protocol]) -> None:
    first, second = Candidate(Algorithm.ring, Protocol.simple, 1), Candidate(*cell, 1)
    for name, _, _ in world.run(_forced_apart, first, second):
        assert name == SettingDisagreement.__name__


def _mismatch(rank: int, kind: str) -> Any:
    group = dist.new_group()
    tensor = torch.ones(8 if rank != 3 or kind != "bytes" else 16)

    def call() -> None:
        if rank == 3 and kind == "collective":
            dist.broadcast(tensor, 0, group=group)
        elif rank == 3 and kind == "operator":
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        else:
            dist.all_reduce(tensor, group=group)

    return _outcome(group, call)


def test_different_calls_are_told_apart(world: World) -> None:
    for kind in ("collective", "bytes", "operator"):
        for name, text, _ in world.run(_mismatch, kind):
            assert name == CallMismatch.__name__
            assert "rank 3 called" in text


def _plugin_failure(rank: int, fault: str, timeout_s: float) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    dist.all_reduce(torch.ones(4))  # on the group of all, which is patient: a busy machine may keep a rank for long
    faults.configure(fault if rank == 1 or "hang" in fault else "")
    return _outcome(group, lambda: dist.all_reduce(torch.ones(1 << 20), group=group))


def test_a_setting_that_fails_on_one_rank_fails_on_all(world: World) -> None:
    outcomes = world.run(_plugin_failure, "fail:ring/simple", 30)
    assert {name for name, _, _ in outcomes} == {EmulatedNcclError.__name__}
    assert "rank 1 failed" in outcomes[0][1]


def test_a_setting_that_hangs_times_out(world: World) -> None:
    for name, _, seconds in world.run(_plugin_failure, "hang:ring/simple", 0.2):
        assert name == CollectiveTimeout.__name__
        assert 0.2 <= seconds < 2


def _absent(rank: int, n_calls_before: int) -> Any:
    timeout_s = 2.0 if n_calls_before else 0.3  # within it all ranks must come to what they make before
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    for _ in range(n_calls_before):
        dist.barrier(group=group)
    away_s = timeout_s + 0.2
    return _outcome(group, lambda: dist.all_reduce(torch.ones(4), group=group) if rank != 1 else time.sleep(away_s))


@pytest.mark.parametrize("n_calls_before", [0, 1])  # the first call makes the communicator
def test_a_rank_that_stays_away_is_waited_for_until_the_timeout(world: World, n_calls_before: int) -> None:
    names = [name for name, _, _ in world.run(_absent, n_calls_before)]
    assert names == [CollectiveTimeout.__name__, "none", CollectiveTimeout.__name__, CollectiveTimeout.__name__]


def _exhausted(rank: int) -> Any:
    group = dist.new_group()
    if rank == 0:
        device().reserve_mb = 46_000.0
    try:
        return _outcome(group, lambda: dist.all_reduce(torch.ones(1 << 20), group=group))
    finally:
        device().reserve_mb = 0.0


def test_a_full_device_refuses_new_connections(world: World) -> None:
    outcomes = world.run(_exhausted)
    assert outcomes[0][0] == DeviceOutOfMemory.__name__
    assert "connecting ring" in outcomes[0][1]
    assert all("rank 0 failed" in text for _, text, _ in outcomes[1:])


def _plugin_calls(rank: int) -> int:
    return library.load().counters().n_calls


def _unasked(rank: int) -> int:
    alone = [dist.new_group([r]) for r in range(4)][rank]
    group = dist.new_group()
    before = _plugin_calls(rank)
    dist.all_reduce(torch.ones(4), group=alone)
    dist.all_reduce(torch.empty(0), group=group)
    dist.all_to_all_single(torch.empty(4), torch.ones(4), group=group)
    dist.scatter(torch.empty(1), [torch.ones(1)] * 4 if rank == 0 else None, group=group)
    unasked = _plugin_calls(rank) - before
    dist.all_reduce(torch.ones(4), group=group)
    return unasked * 10 + _plugin_calls(rank) - before


def test_the_plugin_is_asked_only_where_nccl_asks(world: World) -> None:
    assert world.run(_unasked) == [1] * 4


def _fused(rank: int) -> list[int]:
    group = dist.new_group()
    calls = []
    for sizes in ((256, 1000), (256, 1024), (10, 30, 100, 300)):  # fused while below 4 times the smallest
        before = _plugin_calls(rank)
        with dist.distributed_c10d._coalescing_manager(group=group):
            for n_elements in sizes:
                dist.all_reduce(torch.ones(n_elements), group=group)
        calls.append(_plugin_calls(rank) - before)
    return calls


def test_grouped_calls_are_fused_as_nccl_does(world: World) -> None:
    assert world.run(_fused) == [[1, 2, 2]] * 4
