"""One rank of a sweep: runs requested settings in one process group by switching plans.

workers.py starts it with the usual torch.distributed environment; commands come on stdin, replies go to stdout. Only
this module of the sweep imports torch. The process ends with its parent, however that ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import numpy as np

from ....store.parent_process import end_with_parent
from ....store.records import BASELINE, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow
from ....store.wire import FLAG_TIMED
from .protocol import (
    ASK_CHUNK_SIZE,
    Failed,
    Measure,
    MeasuredCalls,
    Ready,
    Reply,
    Stop,
    command_of,
    to_line,
    whole_bytes,
)

PROBE_BYTES: Final = (1 << 20, 1 << 14, 1 << 26)
"""Cost tables are read at about these sizes; the first one shows the offered settings."""
TIMED_WAIT_S: Final = 5.0
"""Longest wait for the profiler's records of collectives that have ended."""
_ENTIRE_RANGE: Final = 2**62


class Worker:
    """This rank's process group, plugin and buffers."""

    def __init__(self, backend: str, init_method: str, *, asks_chunk_size: bool) -> None:
        import torch
        import torch.distributed as dist

        from ....agent.nccl import library

        self._torch, self._dist = torch, dist
        self._plugin = library.load()
        self._plugin.ask_chunk_sizes(asks_chunk_size)
        self._rank, self._n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._device = torch.device("cpu")
        if backend == "nccl":
            self._device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self._device)
        else:
            import zerotune.agent.nccl.emulated  # noqa: F401 - registers the backend
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=self._rank,
            world_size=self._n_ranks,
            timeout=timedelta(days=1),  # the sweep has timeouts of its own
        )
        self._communicator = CommunicatorClass(self._n_ranks, 1)
        self._buffers: dict[tuple[Collective, int], tuple[Any, Any]] = {}
        self._plugin.set_phase(Phase.other)
        self._plugin.set_recording(True)

    def probe(self, collectives: tuple[Collective, ...]) -> Ready:
        """Find the settings that NCCL offers for `collectives` by running each once under its own choice."""
        from ....agent.machine import identity
        from ....agent.nccl.catalog import ASKS_CHUNK_SIZE_SINCE

        cells: dict[str, tuple[tuple[int, int], ...]] = {}
        costs: dict[str, dict[int, tuple[tuple[float, ...], ...]]] = {}
        is_real = self._device.type == "cuda"
        sizes = [whole_bytes(size, self._n_ranks) for size in (PROBE_BYTES if is_real else PROBE_BYTES[:1])]
        for collective in collectives:
            found: dict[int, np.ndarray[Any, Any]] = {}
            for message_bytes in sizes:
                self._plugin.drain_costs()
                self._plugin.set_observing(True)
                self._run(collective, message_bytes)()
                self._synchronize()
                self._plugin.set_observing(False)
                tables = self._plugin.drain_costs()
                for table in tables[tables["collective"] == collective][:1]:
                    n_algorithms, n_protocols = int(table["n_algorithms"]), int(table["n_protocols"])
                    found[message_bytes] = table["cost_us"][:n_algorithms, :n_protocols]
                    self._communicator = CommunicatorClass(self._n_ranks, int(table["n_nodes"]))
            offered = found.get(sizes[0], np.zeros((0, 0)))
            cells[collective.name] = tuple((int(a), int(p)) for a, p in np.argwhere(offered >= 0))
            if is_real:
                costs[collective.name] = {size: tuple(map(tuple, one.tolist())) for size, one in found.items()}
        self._plugin.drain()
        fabric = os.environ.get("ZEROTUNE_FABRIC") if self._device.type == "cpu" else None
        fabric_id, description = identity.describe(fabric)
        return Ready(
            n_nodes=self._communicator.n_nodes,
            max_channels=self._max_channels(fabric),
            cells=cells,
            fabric_id=fabric_id,
            fabric=description,
            costs=costs,
            asks_chunk_size=self._plugin.asks_chunk_sizes() and self._plugin.tuner_abi() >= ASKS_CHUNK_SIZE_SINCE,
        )

    def measure(self, command: Measure) -> MeasuredCalls:
        """Run one setting."""
        self._adopt(command.epoch, command.collective, command.candidate)
        run = self._run(command.collective, command.message_bytes)
        is_correct = self._is_correct(command.collective, command.message_bytes) if command.check else True
        for _ in range(command.n_warmup):
            run()
        self._synchronize()
        self._plugin.drain()
        self._plugin.set_observing(True)
        for _ in range(command.n_repeats):
            run()
        self._synchronize()
        records = self._timed(command)
        self._plugin.set_observing(False)
        if len(records) != command.n_repeats:
            raise RuntimeError(f"{len(records)} of {command.n_repeats} collectives were timed")
        last = records[-1]
        return MeasuredCalls(
            epoch=command.epoch,
            duration_us=tuple(records["duration_us"].tolist()),
            algorithm=int(last["algorithm"]),
            protocol=int(last["protocol"]),
            n_channels=int(last["n_channels"]),
            timing_source=int(last["timing_source"]),
            is_correct=is_correct,
        )

    def close(self) -> None:
        """Leave the process group."""
        self._dist.destroy_process_group()

    def _adopt(self, epoch: int, collective: Collective, candidate: Candidate) -> None:
        """Load and adopt a plan with that setting; every rank does so between the same two collectives."""
        row = PlanRow(self._communicator, collective, Phase.other, 1, _ENTIRE_RANGE, candidate)
        self._plugin.load_plan(Plan(epoch, () if candidate == BASELINE else (row,)))
        if not self._plugin.flip(epoch):
            raise RuntimeError(f"the plan of epoch {epoch} could not be adopted")

    def _timed(self, command: Measure) -> np.ndarray[Any, Any]:
        """The profiler's records; on a GPU they arrive a little after the collectives."""
        blocks: list[np.ndarray[Any, Any]] = []
        deadline_s = time.monotonic() + TIMED_WAIT_S
        while sum(map(len, blocks)) < command.n_repeats and time.monotonic() < deadline_s:
            block = self._plugin.drain()
            is_asked = (block["flags"] & FLAG_TIMED != 0) & (block["collective"] == command.collective)
            blocks.append(block[is_asked & (block["message_bytes"] == command.message_bytes)])
            if not len(blocks[-1]):
                time.sleep(0.001)
        records = np.concatenate(blocks)
        return records[np.argsort(records["sequence"], kind="stable")]

    def _max_channels(self, fabric: str | None) -> int:
        if fabric is not None:
            from ....agent.nccl import fabric as fabrics

            return fabrics.load(fabric).max_channels(self._communicator)
        return self._plugin.channels_seen(self._communicator) or 32

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()

    def _tensors(self, collective: Collective, message_bytes: int) -> tuple[Any, Any]:
        """(input, output) of float32; the larger one has `message_bytes`."""
        key = (collective, message_bytes)
        if key not in self._buffers:
            torch, n_whole = self._torch, message_bytes // 4
            n_shard = n_whole // self._n_ranks
            n_in = n_shard if collective is Collective.all_gather else n_whole
            n_out = n_shard if collective is Collective.reduce_scatter else n_whole
            source = torch.empty(n_in, dtype=torch.float32, device=self._device)
            in_place = collective in (Collective.all_reduce, Collective.broadcast)
            output = source if in_place else torch.empty(n_out, dtype=torch.float32, device=self._device)
            self._buffers = {key: (source, output)}  # only one size is kept, as sweeps go up to gigabytes
            source.fill_(1.0)
        return self._buffers[key]

    def _run(self, collective: Collective, message_bytes: int) -> Callable[[], Any]:
        source, output = self._tensors(collective, message_bytes)
        dist = self._dist
        runs: dict[Collective, Callable[[], Any]] = {
            Collective.all_gather: lambda: dist.all_gather_into_tensor(output, source),
            Collective.reduce_scatter: lambda: dist.reduce_scatter_tensor(output, source),
            Collective.all_reduce: lambda: dist.all_reduce(output),
            Collective.broadcast: lambda: dist.broadcast(output, 0),
        }
        return runs[collective]

    def _is_correct(self, collective: Collective, message_bytes: int) -> bool:
        """Whether one collective of small integers gives exactly the right result."""
        torch, n_ranks = self._torch, self._n_ranks
        source, output = self._tensors(collective, message_bytes)
        pattern = torch.arange(source.numel(), device=self._device) % 251
        source.copy_(pattern + self._rank)
        self._run(collective, message_bytes)()
        total = n_ranks * (n_ranks - 1) // 2
        if collective is Collective.all_gather:
            expected = torch.cat([pattern + rank for rank in range(n_ranks)])
        elif collective is Collective.reduce_scatter:
            n_shard = output.numel()
            expected = pattern[self._rank * n_shard : (self._rank + 1) * n_shard] * n_ranks + total
        elif collective is Collective.all_reduce:
            expected = pattern * n_ranks + total
        else:
            expected = pattern
        is_correct = bool(torch.equal(output, expected.to(output.dtype)))
        source.fill_(0.0)  # in-place sums would grow without bound over the timed calls
        return is_correct


def main(arguments: list[str]) -> None:
    """`python -m zerotune.tuner.offline.sweep.worker BACKEND INIT_METHOD ASKED COLLECTIVE...`."""
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries' output goes to the log, not among the replies

    def reply(message: Reply) -> None:
        replies.write(to_line(message))

    try:
        backend, init_method, asked, *names = arguments
        worker = Worker(backend, init_method, asks_chunk_size=asked == ASK_CHUNK_SIZE)
        reply(worker.probe(tuple(Collective[name] for name in names)))
        for line in sys.stdin.buffer:
            command = command_of(line)
            if isinstance(command, Stop):
                worker.close()
                os._exit(0)  # nothing is left to clean up, and tearing torch down takes half a second
            reply(worker.measure(command))
    except Exception as error:
        reply(Failed(f"{type(error).__name__}: {error}"[:500]))
        os._exit(1)  # a stuck communicator must not hold up the end


if __name__ == "__main__":
    main(sys.argv[1:])
