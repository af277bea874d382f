"""What the emulated NCCL notices where the real one would hang, and what it tells every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_world import World

from zerotune.agent.nccl import library
from zerotune.agent.nccl.emulated import EmulatedNcclError, SettingDisagreement, faults, journal
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
