"""One variant of real_nccl.py: two ranks on the mock GPU, and rank 0's calls timed whenever a number comes in."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rehearse.device_functions import device_functions
from zerotune.agent.nccl import library
from zerotune.agent.nccl.libnccl import Libnccl
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.mock_cuda.mock import MockCuda
from zerotune.agent.nccl.twin.machines import MACHINES
from zerotune.store.records import Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow

MESSAGE_BYTES = 1 << 20
SHAPE = CommunicatorClass(2, 1)


def on_both_ranks(mock: MockCuda, work: Callable[[int], Any]) -> None:
    def run(rank: int) -> None:
        mock.set_device(rank)
        work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rows(n: int, candidate: Candidate) -> tuple[PlanRow, ...]:
    """A plan whose middle row is the one that applies, with NCCL's own setting."""
    sizes = [MESSAGE_BYTES + 64 * (place - n // 2) for place in range(n)]
    return tuple(PlanRow(SHAPE, Collective.all_gather, Phase.other, size, size, candidate) for size in sizes)


def main() -> None:
    path, built, variant, n_rows = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / "topology.xml"
        topology.write_text(MACHINES["dgx_h100"].topology())
        mock = MockCuda()
        mock.set_machine(read_machine(topology), "node")
        plugin = library.load()
        ours = "none" if variant == "none" else str(plugin.path)
        profiler = {"null_profiler": str(built / "null_profiler.so"), "tuner_alone": "none"}.get(variant, ours)
        os.environ.update(NCCL_TUNER_PLUGIN=ours, NCCL_PROFILER_PLUGIN=profiler)
        nccl = Libnccl(path)
        base = mock.attach(path, nccl.library, nccl.version)
        unique_id, communicators = nccl.unique_id(), [0, 0]

        def connect(rank: int) -> None:
            communicators[rank] = nccl.init_rank(2, unique_id, rank)

        def call(rank: int) -> None:
            nccl.call(Collective.all_gather, communicators[rank], (1 << 28, 1 << 29), MESSAGE_BYTES // 2, 0)

        began_s = time.monotonic()
        on_both_ranks(mock, connect)
        init_ms = 1000 * (time.monotonic() - began_s)
        mock.set_recording(True)
        on_both_ranks(mock, call)
    work = mock.drain()[0]
    mock.set_recording(False)
    if n_rows:
        own = device_functions(path, base)[int(work["function_id"])]
        candidate = Candidate(own.algorithm, own.protocol, int(work["channel_mask"]).bit_count())
        plugin.load_plan(Plan(epoch=1, rows=rows(n_rows, candidate)))
        plugin.flip(1)
    plugin.set_recording(variant == "records")
    plugin.set_observing(variant == "observing")
    mock.set_device(0)
    loop = ctypes.CDLL(str(built / "real_nccl_loop.so")).loop
    loop.restype, loop.argtypes = ctypes.c_double, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    entry = ctypes.cast(nccl.library.ncclAllGather, ctypes.c_void_p)
    print(init_ms, file=out, flush=True)
    for line in sys.stdin:
        print(loop(entry, communicators[0], MESSAGE_BYTES // 2, int(line)), file=out, flush=True)
        plugin.drain()
    os._exit(0)


if __name__ == "__main__":
    main()
