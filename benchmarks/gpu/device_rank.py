"""One rank in the steps about the device's own time: times, ahead, observing, capture, beside.

Started by ranks.py like rank.py. Without a GPU the emulation's clock stands for events, and there are no CUDA graphs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.rank import Rank, carry_out
from zerotune.agent.nccl.emulated.device.clock import mark_compute_us
from zerotune.agent.steps.clock import EventClock, TrainingClock, VirtualClock
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Protocol

GATHER: Final = Collective.all_gather
TIMED_BYTES: Final = tuple(1 << shift for shift in range(12, 28, 2))
N_TIMED: Final = 20
"""Calls of each size; each takes two of a clock's events, and all must fit."""
N_STEPS: Final = 30
N_TURNS: Final = 6
N_CALLS: Final = 200
"""Of a turn with or without observing."""
SMALL_BYTES: Final = 65536
N_CAPTURED: Final = 20
BESIDE_BYTES: Final = 1 << 26
BESIDE_CHANNELS: Final = (0, 1, 2, 4, 8, 16)
"""0: NCCL's own choice."""
MATRIX: Final = 4096
EMULATED_WORK_US: Final = 20_000.0


def clock_of(rank: Rank) -> TrainingClock:
    return VirtualClock() if rank.fabric else EventClock(torch.cuda)


def lasted_us(rank: Rank, clock: TrainingClock, work: Callable[[], object]) -> float:
    began = clock.note()
    work()
    ended = clock.note()
    rank.synchronize()
    assert began is not None
    assert ended is not None
    return ended.us_since(began)


def times(rank: Rank, _options: argparse.Namespace) -> None:
    """The profiler's durations beside those between events on the stream that waits for the collective."""
    clock = clock_of(rank)
    rank.plugin.set_observing(True)
    for size in TIMED_BYTES:
        source, output = rank.tensors(GATHER, size)
        rank.run(GATHER, source, output)
        rank.synchronize()
        rank.timed(GATHER, size, 1)
        event_us = [lasted_us(rank, clock, lambda: rank.run(GATHER, source, output)) for _ in range(N_TIMED)]  # noqa: B023
        records = rank.timed(GATHER, size, N_TIMED)
        rank.write(
            message_bytes=size, event_us=median(event_us), n_timed=len(records),
            profiler_us=float(np.median(records["duration_us"])) if len(records) else None,
            timing_source=int(records["timing_source"][0]) if len(records) else 0,
            starts_ns=[int(start) for start in records["start_ns"]],
        )  # fmt: skip


def ahead(rank: Rank, _options: argparse.Namespace) -> None:
    """Steps by the host's clock and by events, with and without a wait for a value in each."""
    size = 64 if rank.fabric else MATRIX
    weight = torch.randn(size, size, device=rank.device) / size
    gradient = torch.ones(1 << 20, device=rank.device)
    for has_item in (False, True):
        clock, value = clock_of(rank), weight
        instants, host_us, n_behind = [], [], 0
        for _ in range(N_STEPS):
            for _ in range(8):
                value = value @ weight
            dist.all_reduce(gradient)
            if has_item:
                value.sum().item()
            instants.append(clock.note())
            host_us.append(time.perf_counter_ns() / 1e3)
            n_behind = max(n_behind, sum(one is not None and not one.is_reached() for one in instants))
        rank.synchronize()
        noted = pairwise(one for one in instants if one is not None)
        event_us = median(now.us_since(before) for before, now in noted)
        host_step_us = float(np.median(np.diff(host_us)))
        rank.write(has_item=has_item, host_us=host_step_us, event_us=event_us, most_behind=n_behind)


def observing(rank: Rank, options: argparse.Namespace) -> None:
    """The cost of a small call for the host and the device while NCCL reports it to the profiler, and while not."""
    clock = clock_of(rank)
    source, output = rank.tensors(GATHER, SMALL_BYTES)

    enqueue_us = 0.0

    def calls() -> None:
        nonlocal enqueue_us
        began_ns = time.perf_counter_ns()
        for _ in range(N_CALLS):
            rank.run(GATHER, source, output)
        enqueue_us = (time.perf_counter_ns() - began_ns) / 1e3 / N_CALLS

    lasted_us(rank, clock, calls)
    for turn in range(2 * N_TURNS):
        is_on = bool(turn % 2) and not options.absent
        rank.plugin.set_observing(is_on)
        device_us = lasted_us(rank, clock, calls) / N_CALLS
        rank.plugin.drain()
        mode = "absent" if options.absent else "on" if is_on else "off"
        rank.write(mode=mode, enqueue_us=enqueue_us, device_us=device_us)


def capture(rank: Rank, _options: argparse.Namespace) -> None:
    """Replays of collectives that were captured with and without reports to the profiler."""
    if rank.fabric:
        rank.write(skipped="the emulated NCCL has no CUDA graphs")
        return
    clock = clock_of(rank)
    source, output = rank.tensors(GATHER, SMALL_BYTES)
    for is_on in (False, True):
        rank.plugin.set_observing(is_on)
        rank.run(GATHER, source, output)
        rank.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(N_CAPTURED):
                rank.run(GATHER, source, output)
        rank.plugin.set_observing(False)
        graph.replay()
        replays_us = [lasted_us(rank, clock, graph.replay) for _ in range(N_TIMED)]
        rank.plugin.drain()
        rank.write(is_observed=is_on, replay_us=median(replays_us), n_collectives=N_CAPTURED)
        del graph


def beside(rank: Rank, _options: argparse.Namespace) -> None:
    """A gather beside a matrix product, by channels: the effect of fewer channels."""
    clock = clock_of(rank)
    shape, cells = rank.probe(GATHER)
    ring = Candidate(Algorithm.ring, Protocol.simple)
    if ring not in cells:
        raise RuntimeError(f"NCCL offers no ring/simple: {[str(cell) for cell in cells]}")
    source, output = rank.tensors(GATHER, BESIDE_BYTES)
    weight = None if rank.fabric else torch.randn(MATRIX, MATRIX, device=rank.device, dtype=torch.bfloat16)

    def product() -> None:
        if weight is None:
            mark_compute_us(EMULATED_WORK_US)
            return
        for _ in range(8):
            torch.mm(weight, weight)

    def both() -> None:
        gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        work = gather(output, source, async_op=True)
        product()
        work.wait()

    product()
    for n_channels in BESIDE_CHANNELS:
        setting = BASELINE if n_channels == 0 else Candidate(Algorithm.ring, Protocol.simple, n_channels)
        rank.adopt(shape, GATHER, setting)
        rank.run(GATHER, source, output)
        took = {
            name: median(lasted_us(rank, clock, work) for _ in range(N_TIMED // 2))
            for name, work in (
                ("gather_us", lambda: rank.run(GATHER, source, output)),
                ("product_us", product),
                ("both_us", both),
            )
        }
        rank.write(n_channels=n_channels, **took)


MODES = {mode.__name__: mode for mode in (times, ahead, observing, capture, beside)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--absent", action="store_true", help="NCCL was told of no plugin")
    options = parser.parse_args()
    carry_out(MODES[options.mode], options)


if __name__ == "__main__":
    main()
