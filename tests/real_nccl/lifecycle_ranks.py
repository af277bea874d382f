"""A program: ranks that make communicators of the real NCCL on the mock, use them and give them up.

Prints a JSON line for each rank that lived: what the process held after each round, and the plugin's counters.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path

from benchmarks.rehearse.mock_gpu import MockGpu
from zerotune.agent.nccl.libnccl import IN_PROGRESS, Libnccl, NcclError, UniqueId, non_blocking_config
from zerotune.agent.nccl.library import Plugin
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.mock_cuda.mock import MockCuda
from zerotune.store.records import Collective

MESSAGE_BYTES = 1 << 16
COLLECTIVES = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce)
N_USES = 4
N_REPLAYS = 3
KERNEL_US = 10.0


class Rank:
    """This process, as one rank."""

    def __init__(self, options: argparse.Namespace, rank: int, ids: list) -> None:
        self.rank, self.n_ranks, self.ids = rank, options.n_ranks, ids
        ranks_per_node = options.n_ranks // options.n_nodes
        self.device = rank % ranks_per_node
        self.mock = MockGpu() if options.scenario == "graphs" else MockCuda()
        self.mock.set_machine(read_machine(options.topology), f"node-{rank // ranks_per_node}")
        self.plugin = Plugin(options.plugin)
        os.environ.update(NCCL_TUNER_PLUGIN=options.plugin.name, NCCL_PROFILER_PLUGIN=options.plugin.name)
        self.plugin.set_observing(True)
        self.plugin.set_recording(True)
        self.nccl = Libnccl(options.library)
        self.mock.attach(options.library, self.nccl.library, self.nccl.version)
        self.mock.set_device(self.device)
        self.buffers = (self.mock.malloc(MESSAGE_BYTES), self.mock.malloc(MESSAGE_BYTES))
        self.levels: list[tuple[int, int, int]] = []
        self.shared_files: set[str] = set()
        self.n_records = {True: 0, False: 0}

    def unique_ids(self, n: int) -> list[bytes]:
        """Alike on all ranks."""
        if self.rank != 0:
            received: list[bytes] = self.ids[self.rank][0].recv()
            return received
        made = [self.nccl.unique_id() for _ in range(n)]
        for _, sender in self.ids[1:]:
            sender.send(made)
        return made

    def new(self, n: int = 1) -> list[int]:
        """Communicators of all ranks."""
        unique_ids = self.unique_ids(n)
        return [self.nccl.init_rank(self.n_ranks, unique_id, self.rank) for unique_id in unique_ids]

    def use(self, communicators: Iterable[int], n_ranks: int = 0, stream: int | None = None) -> None:
        """Collectives of each, in turn."""
        communicators = list(communicators)
        for _ in range(N_USES):
            for communicator in communicators:
                for collective in COLLECTIVES:
                    self.nccl.enqueue(
                        collective, communicator, MESSAGE_BYTES, n_ranks or self.n_ranks, self.buffers, stream=stream
                    )

    def child(self, how: str, communicator: int, *arguments: object) -> int:
        """ncclCommSplit or ncclCommShrink; 0: this rank is in none."""
        made = ctypes.c_void_p()
        function = getattr(self.nccl.library, how)
        before = [ctypes.c_void_p(communicator), *arguments]
        behind = [None, 0] if how == "ncclCommShrink" else [None]
        code = function(*before, ctypes.byref(made), *behind)
        if code != 0:
            raise NcclError(how, code, "?")
        return made.value or 0

    def note(self) -> None:
        """What the process holds now."""
        for record in self.plugin.drain():
            self.n_records[bool(record["flags"] & 2)] += 1
        status = Path("/proc/self/status").read_text()
        resident_kib = int(status.split("VmRSS:")[1].split()[0])
        self.levels.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident_kib))


def again(rank: Rank, n: int) -> None:
    """Made, used, destroyed, n times."""
    for _ in range(n):
        (communicator,) = rank.new()
        rank.use([communicator])
        rank.nccl.destroy(communicator)
        rank.note()


def at_once(rank: Rank, n: int) -> None:
    """n at the same time, twice."""
    for _ in range(2):
        communicators = rank.new(n)
        rank.use(communicators)
        for communicator in reversed(communicators):
            rank.nccl.destroy(communicator)
        rank.note()


def split(rank: Rank, n: int) -> None:
    """Halves of one communicator, that outlive it every second time."""
    for number in range(n):
        (whole,) = rank.new()
        half = rank.child("ncclCommSplit", whole, rank.rank % 2, rank.rank)
        rank.use([whole])
        rank.use([half], rank.n_ranks // 2)
        for communicator in (whole, half) if number % 2 else (half, whole):
            rank.nccl.destroy(communicator)
        rank.note()


def shrink(rank: Rank, n: int) -> None:
    """Without the last rank."""
    for _ in range(n):
        (whole,) = rank.new()
        rank.use([whole])
        if rank.rank < rank.n_ranks - 1:
            excluded = (ctypes.c_int * 1)(rank.n_ranks - 1)
            rest = rank.child("ncclCommShrink", whole, excluded, 1)
            rank.use([rest], rank.n_ranks - 1)
            rank.nccl.destroy(rest)
        rank.nccl.destroy(whole)
        rank.note()


def finalize(rank: Rank, n: int) -> None:
    """ncclCommFinalize while kernels are being observed."""
    for _ in range(n):
        (communicator,) = rank.new()
        rank.use([communicator])
        code = rank.nccl.library.ncclCommFinalize(ctypes.c_void_p(communicator))
        if code != 0:
            raise NcclError("ncclCommFinalize", code, "?")
        rank.nccl.destroy(communicator)
        rank.note()


def non_blocking(rank: Rank, n: int) -> None:
    """As c10d makes them eagerly: no call waits, and NCCL's own threads decide and launch."""
    library, config = rank.nccl.library, non_blocking_config()

    def wait(code: int, communicator: ctypes.c_void_p) -> None:
        state = ctypes.c_int(code)
        while state.value == IN_PROGRESS:
            library.ncclCommGetAsyncError(communicator, ctypes.byref(state))
        if state.value != 0:
            raise NcclError("ncclCommGetAsyncError", state.value, "?")

    for _ in range(n):
        made, (unique_id,) = ctypes.c_void_p(), rank.unique_ids(1)
        arguments = ctypes.byref(made), rank.n_ranks, UniqueId.of(unique_id), rank.rank, ctypes.byref(config)
        code = library.ncclCommInitRankConfig(*arguments)
        assert code == IN_PROGRESS
        wait(code, made)
        for collective in N_USES * COLLECTIVES:
            try:
                rank.nccl.enqueue(collective, made.value or 0, MESSAGE_BYTES, rank.n_ranks, rank.buffers)
            except NcclError as error:
                wait(error.code, made)
        wait(library.ncclCommFinalize(made), made)
        rank.nccl.destroy(made.value or 0)
        rank.note()


def abort(rank: Rank, n: int) -> None:
    """Given up while its kernels run."""
    rank.mock.set_duration_us(-1.0)
    for _ in range(n):
        (communicator,) = rank.new()
        rank.use([communicator])
        rank.nccl.abort(communicator)
        rank.note()


def graphs(rank: Rank, n: int) -> None:
    """Captured once, launched again and again."""
    assert isinstance(rank.mock, MockGpu)
    rank.mock.set_prices(lambda *_: KERNEL_US, noise=0.0, kernel_us=1.0, flops_per_ns=1.0)
    for _ in range(n):
        (communicator,) = rank.new()
        stream = rank.mock.begin_capture()
        rank.use([communicator], stream=stream)
        graph = rank.mock.end_capture(stream)
        for _ in range(N_REPLAYS):
            graph.launch()
        graph.destroy()  # NCCL waits for it
        rank.nccl.destroy(communicator)
        rank.note()


def threads(rank: Rank, n: int) -> None:
    """Two threads, a communicator each."""
    errors: list[NcclError] = []

    def run(communicator: int) -> None:
        rank.mock.set_device(rank.device)
        try:
            rank.use([communicator])
        except NcclError as error:
            errors.append(error)

    for _ in range(n):
        communicators = rank.new(2)
        running = [threading.Thread(target=run, args=(each,)) for each in communicators]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        for communicator in communicators:
            rank.nccl.destroy(communicator)
        rank.note()
    if errors:
        raise errors[0]


def killed(rank: Rank, n: int) -> None:
    """The last rank is killed in the midst of it, after n uses; the others abort."""
    (communicator,) = rank.new()
    for _ in range(n):
        rank.use([communicator])
    maps = Path("/proc/self/maps").read_text().splitlines()
    rank.shared_files = {line.split()[5] for line in maps if "nccl" in line and "rw-s" in line}
    if rank.rank == rank.n_ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.nccl.abort(communicator)
    rank.note()


SCENARIOS: dict[str, Callable[[Rank, int], None]] = {
    each.__name__: each
    for each in (again, at_once, split, shrink, finalize, non_blocking, abort, graphs, threads, killed)
}


def run(options: argparse.Namespace, number: int, ids: list) -> None:
    rank = Rank(options, number, ids)
    SCENARIOS[options.scenario](rank, options.n)
    told = {
        "rank": number,
        "levels": rank.levels,
        "n_decided": rank.n_records[False],
        "n_timed": rank.n_records[True],
        "shared_files": sorted(rank.shared_files),
    }
    os.write(1, (json.dumps(told | asdict(rank.plugin.counters())) + "\n").encode())
    os._exit(0)  # at its end Python would close what NCCL's threads still use


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("library", "plugin", "topology"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("n_ranks", "n_nodes", "n"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--scenario", choices=SCENARIOS)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")
    ids = [context.Pipe(duplex=False) for _ in range(options.n_ranks)]
    processes = [context.Process(target=run, args=(options, rank, ids)) for rank in range(options.n_ranks)]
    for process in processes:
        process.start()
    is_fine = {0, -signal.SIGKILL} if options.scenario == "killed" else {0}
    left = {process.sentinel: process for process in processes}
    while left:
        for sentinel in wait(list(left)):
            ended = left.pop(sentinel)
            ended.join()
            if ended.exitcode not in is_fine:
                for process in processes:
                    process.kill()  # the others wait for it
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
