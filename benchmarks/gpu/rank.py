"""One rank in the steps that need no training: load, forced, soak, sweep.

Started by ranks.py with the usual torch.distributed environment; ZEROTUNE_FABRIC set means the emulated NCCL.
Each rank writes its records at once to its own file in --out, one JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.rehearse.settings import FABRIC as REHEARSAL
from zerotune.agent.machine import identity
from zerotune.agent.nccl import library
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
)
from zerotune.store.wire import FLAG_TIMED

TIMEOUT = timedelta(seconds=120)
EVERY_SIZE = 2**62
TIMED_WITHIN_S = 5.0
"""The profiler's records come a little after the collectives."""
PROBE_BYTES = 1 << 20
FORCED_CHANNELS = (1, 4, 16)
FORCED_CALLS = 3
"""One may stay without its times: NCCL forgets a channel's if its thread was away at the wrong moment."""
SWEEP_BYTES = tuple(1 << shift for shift in range(12, 27, 2))
SWEEP_CHANNELS = (1, 2, 4, 8, 16)
CALLS_PER_BOUNDARY = 20
SOAK_BYTES = (4096, 65536, 1 << 20)
COLLECTIVES = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce)


class Rank:
    def __init__(self, out: Path) -> None:
        self.fabric = os.environ.get("ZEROTUNE_FABRIC")
        self.plugin = library.load()
        self.plugin.set_recording(True)
        self.device = torch.device("cpu" if self.fabric else f"cuda:{os.environ['LOCAL_RANK']}")
        if self.fabric:
            import zerotune.agent.nccl.emulated  # noqa: F401 - registers the backend
        else:
            torch.cuda.set_device(self.device)
        dist.init_process_group("emulated_nccl" if self.fabric else "nccl", timeout=TIMEOUT)
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()
        self._out = (out / f"rank{self.rank}.jsonl").open("a", buffering=1)
        self._is_computed = REHEARSAL not in os.environ
        self._n_told = 0
        self._epoch = 0

    def write(self, **fields: Any) -> None:
        self._out.write(json.dumps(fields) + "\n")

    def told_by_rank_0(self, value: Any) -> Any:
        """Rank 0's `value` on all ranks: a rank must not decide alone on its own measurement."""
        store = dist.PrefixStore("gpu-benchmark", dist.distributed_c10d._get_default_store())
        key = str(self._n_told)
        self._n_told += 1
        if self.rank == 0:
            store.set(key, json.dumps(value))
        return json.loads(store.get(key))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tensors(self, collective: Collective, message_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input, output) of float32 with known contents; message_bytes is the size of the larger one."""
        whole = message_bytes // 4
        shard = whole // self.n_ranks
        n_in = shard if collective is Collective.all_gather else whole
        n_out = shard if collective is Collective.reduce_scatter else whole
        source = torch.full((n_in,), float(self.rank + 1), device=self.device)
        return source, source if collective is Collective.all_reduce else torch.zeros(n_out, device=self.device)

    def run(self, collective: Collective, source: torch.Tensor, output: torch.Tensor) -> None:
        if collective is Collective.all_gather:
            getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, source)
        elif collective is Collective.reduce_scatter:
            getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, source)
        else:
            dist.all_reduce(output)

    def is_correct(self, collective: Collective, message_bytes: int) -> bool:
        """Run it once; returns whether the result is exact. A rehearsal computes nothing: it is always exact."""
        source, output = self.tensors(collective, message_bytes)
        self.run(collective, source, output)
        if not self._is_computed:
            return True
        if collective is Collective.all_gather:
            expected = torch.arange(1.0, self.n_ranks + 1, device=self.device).repeat_interleave(source.numel())
        else:
            expected = torch.full_like(output, self.n_ranks * (self.n_ranks + 1) / 2)
        return bool(torch.equal(output, expected))

    def adopt(self, shape: CommunicatorClass, collective: Collective, candidate: Candidate) -> None:
        """Put one setting in force; every rank is between the same two collectives, as at a boundary of training.

        Raises:
            RuntimeError: the plugin did not take the plan.
        """
        self._epoch += 1
        row = PlanRow(shape, collective, Phase.other, 1, EVERY_SIZE, candidate)
        self.plugin.load_plan(Plan(self._epoch, () if candidate == BASELINE else (row,)))
        if not self.plugin.flip(self._epoch):
            raise RuntimeError(f"the plan of epoch {self._epoch} could not be adopted")

    def timed(self, collective: Collective, message_bytes: int, n_expected: int) -> np.ndarray[Any, Any]:
        """Timed records of one collective under the setting in force, as soon as there are enough."""
        blocks: list[np.ndarray[Any, Any]] = []
        deadline_s = time.monotonic() + TIMED_WITHIN_S
        while sum(map(len, blocks)) < n_expected and time.monotonic() < deadline_s:
            block = self.plugin.drain()
            own = (block["flags"] & FLAG_TIMED != 0) & (block["collective"] == collective)
            own &= block["epoch"] == self._epoch  # a record may arrive when the next plan has begun
            blocks.append(block[own & (block["message_bytes"] == message_bytes)])
            time.sleep(0 if len(blocks[-1]) else 0.001)
        return np.concatenate(blocks)

    def probe(self, collective: Collective) -> tuple[CommunicatorClass, list[Candidate]]:
        """The communicator's shape, and the cells that NCCL itself offers here for `collective`."""
        self.plugin.drain_costs()
        correct = self.is_correct(collective, PROBE_BYTES)
        tables = self.plugin.drain_costs()
        tables = tables[tables["collective"] == collective]
        found: Any = None
        if self.rank == 0:
            if not correct or not len(tables):
                raise RuntimeError(f"{collective.name}: correct {correct}, {len(tables)} cost tables seen")
            table = tables[0]
            offered = np.argwhere(table["cost_us"][: table["n_algorithms"], : table["n_protocols"]] >= 0)
            found = [self.n_ranks, int(table["n_nodes"]), offered.tolist()]
        n_ranks, n_nodes, cells = self.told_by_rank_0(found)
        shape = CommunicatorClass(n_ranks, n_nodes)
        return shape, [Candidate(Algorithm(algorithm), Protocol(protocol)) for algorithm, protocol in cells]


def setting(record: Any) -> dict[str, int]:
    return {name: int(record[name]) for name in ("algorithm", "protocol", "n_channels")}


def load(rank: Rank, _options: argparse.Namespace) -> None:
    """One collective of each kind: which interfaces NCCL uses, which cells it offers, and the source of times."""
    rank.plugin.set_observing(True)
    sources: set[int] = set()
    offered = {}
    for collective in COLLECTIVES:
        _, cells = rank.probe(collective)
        offered[collective.name] = [str(cell) for cell in cells]
        rank.synchronize()
        sources |= {int(source) for source in rank.timed(collective, PROBE_BYTES, 1)["timing_source"]}
    version = identity.nccl_version()
    if rank.fabric:
        from zerotune.agent.nccl.release import release

        major, minor, patch = (*release(os.environ).version, 0)[:3]
        version = major * 10000 + minor * 100 + patch
    rank.write(
        nccl_version=version, tuner_abi=rank.plugin.tuner_abi(), offered=offered, timing_sources=sorted(sources),
        n_timed=rank.plugin.counters().n_timed,
    )  # fmt: skip


def forced(rank: Rank, _options: argparse.Namespace) -> None:
    """Ask for every cell that NCCL offers; the profiler reports the cells that ran."""
    rank.plugin.set_observing(True)
    for collective in COLLECTIVES:
        shape, cells = rank.probe(collective)
        for cell in cells:
            for n_channels in FORCED_CHANNELS:
                asked = Candidate(cell.algorithm, cell.protocol, n_channels)
                rank.adopt(shape, collective, asked)
                correct = sum(rank.is_correct(collective, PROBE_BYTES) for _ in range(FORCED_CALLS)) == FORCED_CALLS
                rank.synchronize()
                ran = [setting(record) for record in rank.timed(collective, PROBE_BYTES, FORCED_CALLS)]
                rank.write(
                    collective=collective.name, message_bytes=PROBE_BYTES, correct=correct, asked=_asked(asked), ran=ran
                )
        rank.adopt(shape, collective, BASELINE)


def _asked(candidate: Candidate) -> dict[str, int]:
    assert candidate.algorithm is not None
    assert candidate.protocol is not None
    return {
        "algorithm": int(candidate.algorithm), "protocol": int(candidate.protocol), "n_channels": candidate.n_channels
    }  # fmt: skip


def soak(rank: Rank, options: argparse.Namespace) -> None:
    """New plans all the time, agreed by the agent's own protocol, while collectives run."""
    from zerotune.agent.agreement import Agreement
    from zerotune.agent.agreement.news import Offered, PollFor
    from zerotune.agent.job_store import open_job_store

    shape, cells = rank.probe(Collective.all_gather)
    agreement = Agreement(open_job_store(), rank.rank, rank.n_ranks, rank.plugin, lambda _: None)
    agreement.post(PollFor(float("inf")))
    rank.plugin.set_observing(True)
    ladder = [Candidate(cell.algorithm, cell.protocol, n) for n in FORCED_CHANNELS for cell in cells]
    kept = {(collective, size): rank.tensors(collective, size) for collective in COLLECTIVES[:2] for size in SOAK_BYTES}
    n_wrong, n_timed, epochs = 0, 0, [0]
    began_s = time.monotonic()
    n_done = 0
    for call in range(options.collectives):
        n_done = call + 1
        collective = COLLECTIVES[call % 2]
        rank.run(collective, *kept[collective, SOAK_BYTES[call % len(SOAK_BYTES)]])
        if call % CALLS_PER_BOUNDARY == CALLS_PER_BOUNDARY - 1:
            n_boundary = call // CALLS_PER_BOUNDARY + 1
            n_wrong += not rank.is_correct(Collective.all_gather, 65536)
            if rank.rank == 0:
                rows = tuple(
                    PlanRow(shape, kind, None, 1, EVERY_SIZE, ladder[n_boundary % len(ladder)])
                    for kind in COLLECTIVES[:2]
                )
                agreement.post(Offered(Plan(epoch=n_boundary, rows=rows)))
            epoch = rank.plugin.active_epoch()
            if epoch != epochs[-1]:
                epochs.append(epoch)
            n_timed += _n_timed(rank)
            # Slow is not hung: report the progress rather than be killed.
            if n_boundary % 10 == 0 and not rank.told_by_rank_0(time.monotonic() - began_s < options.seconds):
                break
    rank.synchronize()
    seconds = time.monotonic() - began_s
    time.sleep(0.2)
    n_timed += _n_timed(rank)
    agreement.close()
    counters = rank.plugin.counters()
    rank.write(
        n_collectives=n_done,
        n_wrong=n_wrong, n_epochs=len(epochs), last_epoch=epochs[-1],
        n_timed=n_timed, n_lost=counters.n_dropped_records + counters.n_lost_events + counters.n_abandoned_events,
        n_checks=n_done // CALLS_PER_BOUNDARY, collectives_per_s=n_done / seconds,
    )  # fmt: skip


def _n_timed(rank: Rank) -> int:
    block = rank.plugin.drain()
    return int((block["flags"] & FLAG_TIMED != 0).sum())


def sweep(rank: Rank, options: argparse.Namespace) -> None:
    """Sizes x cells x channels, NCCL's own choice first at each size; ends when the time is up."""
    deadline_s = time.monotonic() + options.seconds
    done = {tuple(key) for key in json.loads(options.done.read_text())} if options.done else set()
    rank.plugin.set_observing(True)
    offered = {collective: rank.probe(collective) for collective in COLLECTIVES[:2]}
    for n_channels in (0, *sorted(SWEEP_CHANNELS, reverse=True)):
        for size in SWEEP_BYTES:
            for collective, (shape, cells) in offered.items():
                settings = [Candidate(cell.algorithm, cell.protocol, n_channels) for cell in cells]
                for candidate in [BASELINE] if n_channels == 0 else settings:
                    if (collective.name, size, str(candidate)) in done:
                        continue
                    if not rank.told_by_rank_0(time.monotonic() < deadline_s):
                        return
                    _measure(rank, shape, collective, size, candidate, options.repeats)


def _measure(
    rank: Rank, shape: CommunicatorClass, collective: Collective, size: int, candidate: Candidate, n_repeats: int
) -> None:
    rank.adopt(shape, collective, candidate)
    source, output = rank.tensors(collective, size)
    rank.synchronize()
    began_s = time.monotonic()
    rank.run(collective, source, output)  # connects what was never used before
    rank.synchronize()
    n_repeats = rank.told_by_rank_0(max(3, min(n_repeats, int(0.5 / (time.monotonic() - began_s + 1e-6)))))
    rank.timed(collective, size, 1)
    for _ in range(n_repeats):
        rank.run(collective, source, output)
    rank.synchronize()
    records = rank.timed(collective, size, n_repeats)
    durations_us = [float(duration) for duration in records["duration_us"]]
    rank.write(
        collective=collective.name, message_bytes=size, asked=str(candidate), n_timed=len(records),
        ran=setting(records[-1]) if len(records) else None, durations_us=durations_us,
        median_us=statistics.median(durations_us) if durations_us else None,
        timing_source=int(records[-1]["timing_source"]) if len(records) else 0,
    )  # fmt: skip


MODES = {mode.__name__: mode for mode in (load, forced, soak, sweep)}


def carry_out(mode: Callable[[Rank, argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Run one mode, from the start of the process group to its end."""
    rank = Rank(options.out)
    mode(rank, options)
    rank.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--collectives", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--done", type=Path)
    options = parser.parse_args()
    carry_out(MODES[options.mode], options)


if __name__ == "__main__":
    main()
