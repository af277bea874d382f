"""Both ranks of a communicator in this process, and what the plugin says of them: no world has to be started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.nccl import library
from zerotune.agent.nccl.emulated.host import communicator, grouping
from zerotune.agent.nccl.emulated.host.calls import IssuedCall, Task
from zerotune.agent.nccl.emulated.host.communicator import Communicator
from zerotune.agent.nccl.emulated.host.plugin_host import plugin_host
from zerotune.agent.nccl.emulated.settings import Emulation
from zerotune.agent.nccl.emulated.torch_backend import tasks
from zerotune.agent.nccl.emulated.torch_backend.reduction import AVERAGE, SUM, Operator
from zerotune.store.records import Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow

MIB = 1 << 20
VARIABLES = (
    "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_CTAS", "NCCL_CTA_POLICY",
    "ZEROTUNE_NCCL_VERSION", "ZEROTUNE_NEXT_TUNER", "ZEROTUNE_NEXT_PROFILER",
)  # fmt: skip


class Pair:
    """Makes pairs of ranks; whoever makes it closes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._made: list[Communicator] = []

    def __call__(self, fabric: str = "ethernet_boxes", **environment: str) -> list[Communicator]:
        """Rank 0 and rank 1 of a new communicator, NCCL loaded anew under these environment variables."""
        for name in VARIABLES:
            self._monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            self._monkeypatch.setenv(name, value)
        plugin_host.cache_clear()
        return self.again(fabric)

    def again(self, fabric: str = "ethernet_boxes", name: str = "pair") -> list[Communicator]:
        """One more pair in the same process."""
        store, emulation = dist.HashStore(), Emulation(fabrics.load(fabric), seed=0)
        for rank in (0, 1):
            communicator.incarnations.clear()
            self._made.append(Communicator(emulation, store, name, rank, [0, 1], timedelta(seconds=5)))
        return self._made[-2:]

    def close(self) -> None:
        for each in self._made:
            each.close()
        plugin_host.cache_clear()


def issue(ranks: list[Communicator], collective: Collective, n_bytes: int, average: bool = False) -> IssuedCall:
    """One collective of `n_bytes` in all, run to its end on both ranks; rank 0's call."""
    return group(ranks, [(collective, n_bytes)], average)[0]


def group(
    ranks: list[Communicator], members: list[tuple[Collective, int]], average: bool = False, finish: bool = True
) -> list[IssuedCall]:
    """A group of collectives, run to its end on both ranks: rank 0's calls, one per fused group."""
    op = Operator(AVERAGE) if average else SUM
    works = [
        grouping.launch(each, [deferred(collective, n_bytes, op, each.rank) for collective, n_bytes in members])
        for each in ranks
    ]
    if finish:
        for work in works:
            work.wait()
        for first, second in zip(works[0].calls, works[1].calls, strict=True):
            assert (first.candidate, first.end_us) == (second.candidate, second.end_us)
    return list(works[0].calls)


def deferred(collective: Collective, n_bytes: int, op: Operator, rank: int) -> grouping.Deferred:
    if n_bytes > 4 * MIB:  # what is decided does not depend on what is in them
        count = n_bytes if collective is Collective.all_reduce else n_bytes // 2
        return grouping.Deferred(collective, [Task(None, n_bytes, count, None)], [], torch.uint8, op, -1, True)
    whole, half = torch.zeros(n_bytes, dtype=torch.uint8), torch.zeros(n_bytes // 2, dtype=torch.uint8)
    task = {
        Collective.all_gather: lambda: tasks.all_gather(whole, half, 2),
        Collective.reduce_scatter: lambda: tasks.reduce_scatter(half, whole, op, rank, 2),
        Collective.all_reduce: lambda: tasks.all_reduce(whole, op),
        Collective.all_to_all: lambda: tasks.all_to_all(list(half.chunk(2)), list(whole.chunk(2)), rank),
    }[collective]()
    todo = task if isinstance(task, list) else [task]
    return grouping.Deferred(collective, todo, [], torch.uint8, op, -1, True)


@contextmanager
def plugin_with(settings: Mapping[Collective, Candidate], shape: CommunicatorClass) -> Iterator[library.Plugin]:
    """The plugin with a plan that asks for these settings at any size, and nothing left over afterwards."""
    plugin = library.load()
    plugin.reset()
    try:
        adopt(plugin, 1, settings, shape)
        yield plugin
    finally:
        plugin.reset()


def adopt(
    plugin: library.Plugin, epoch: int, settings: Mapping[Collective, Candidate], shape: CommunicatorClass
) -> None:
    """Make these settings the plan in force."""
    rows = tuple(PlanRow(shape, each, Phase.other, 1, 1 << 40, candidate) for each, candidate in settings.items())
    plugin.load_plan(Plan(epoch=epoch, rows=rows))
    assert plugin.flip(epoch)
