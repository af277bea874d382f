"""What one collective costs on the emulated NCCL, in CPU time per rank, with the plugin loaded.

Two ranks live in this process, so that no waiting is counted; the message is 1 KiB, so that moving it is not
what is measured. Four figures: decided by the plugin; timed by its profiler as well; replayed from a graph;
and, as the peer, gloo's all-reduce of the same two ranks. CPU time of the whole process, medians of
interleaved rounds.

Run: python -m benchmarks emulated_call [--quick] [--json]
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib.reporting import Result, report
from zerotune.agent.nccl import compiled, fabric, library
from zerotune.agent.nccl.emulated import Graph
from zerotune.agent.nccl.emulated.host import communicator, grouping
from zerotune.agent.nccl.emulated.host.communicator import Communicator
from zerotune.agent.nccl.emulated.settings import Emulation
from zerotune.agent.nccl.emulated.torch_backend import tasks
from zerotune.agent.nccl.emulated.torch_backend.reduction import SUM
from zerotune.store.records import Collective

CALLS_PER_ROUND = 300
TIMEOUT = timedelta(seconds=30)


def emulated_ranks() -> list[Communicator]:
    """Both ranks of one communicator."""
    store, emulation, made = dist.HashStore(), Emulation(fabric.load("ethernet_boxes"), seed=0), []
    for rank in (0, 1):
        communicator.incarnations.clear()
        made.append(Communicator(emulation, store, "cost", rank, [0, 1], TIMEOUT))
    return made


def gloo_ranks() -> list[Any]:
    """Both ranks of a process group of gloo; each rank's constructor waits for the other's."""
    store = dist.HashStore()
    made: list[Any] = [None, None]

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def launch(rank: Communicator, tensor: torch.Tensor) -> Any:
    """One all-reduce on its way."""
    task = tasks.all_reduce(tensor, SUM)
    return grouping.launch(
        rank, [grouping.Deferred(Collective.all_reduce, [task], [tensor], tensor.dtype, SUM, -1, True)]
    )


def cpu_us(call: Callable[[], None]) -> float:
    """CPU microseconds per rank of one call on both."""
    began = time.process_time()
    for _ in range(CALLS_PER_ROUND):
        call()
    return (time.process_time() - began) / CALLS_PER_ROUND / 2 * 1e6


def issue(graph: Graph) -> list[Any]:
    """Issue the one collective that was captured; its calls."""
    captured: Any = graph._nodes[0]
    return list(captured.issue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ends within 60 s")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(dict.fromkeys(("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"), str(compiled.PLUGIN.build())))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    plugin, ranks, peers = library.load(), emulated_ranks(), gloo_ranks()
    tensors = [torch.ones(256), torch.ones(256)]
    graphs = [Graph(), Graph()]
    for rank, graph, tensor in zip(ranks, graphs, tensors, strict=True):
        with graph.capture():
            launch(rank, tensor)

    def decided() -> None:
        for work in [launch(rank, tensor) for rank, tensor in zip(ranks, tensors, strict=True)]:
            work.wait()

    def replayed() -> None:
        for call in [call for graph in graphs for call in issue(graph)]:
            call.communicator.complete(call)

    def by_gloo() -> None:
        for work in [rank.allreduce([tensor]) for rank, tensor in zip(peers, tensors, strict=True)]:
            work.wait()

    found: dict[str, list[float]] = {"decided": [], "timed": [], "replayed": [], "gloo": []}
    for number in range(9 if arguments.quick else 31):
        plugin.set_observing(False)
        one = {"decided": cpu_us(decided), "replayed": cpu_us(replayed), "gloo": cpu_us(by_gloo)}
        plugin.set_observing(True)
        one["timed"] = cpu_us(decided)
        plugin.drain()
        if number:  # the first warms up
            for name, us in one.items():
                found[name].append(us)
    peer_us = median(found["gloo"])
    report(
        "emulated_call",
        [
            Result(f"{name}_us", median(us), "us CPU per rank", "", "gloo", median(us) / peer_us)
            for name, us in found.items()
        ],
        as_json=arguments.json,
    )
    for rank in ranks:
        rank.close()


if __name__ == "__main__":
    main()
