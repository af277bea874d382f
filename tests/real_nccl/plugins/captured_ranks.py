"""Two ranks that capture collectives into graphs, with NCCL's profiler on and off, and replay them.

captured_ranks.py LIBNCCL FOLDER prints what a replay takes, in microseconds, with the plugin told of the capture and
not, and how many timed records later calls of the communicator left: [told, not told, timed].
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from two_ranks import COUNT, TwoRanks

from benchmarks.rehearse.mock_gpu import MockGpu
from zerotune.agent.nccl.libnccl import BFLOAT16
from zerotune.store.records import Collective
from zerotune.store.wire import FLAG_TIMED

N_CALLS, KERNEL_US, HOST_US = 5, 50.0, 10_000.0
"""Far above what this host takes."""


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    mock = MockGpu()
    ranks = TwoRanks(Path(sys.argv[1]), Path(sys.argv[2]), mock=mock)
    nccl, pointer = ranks.nccl, ctypes.c_void_p
    ranks.call(Collective.all_gather)  # connects
    mock.set_prices(lambda *_: KERNEL_US, noise=0.0, kernel_us=1.0, flops_per_ns=1.0, host_us=HOST_US)
    library = ctypes.CDLL(str(mock.path))
    library.mock_cuda_function.restype = pointer

    def cuda(name: str, *arguments: object) -> None:
        assert ctypes.CFUNCTYPE(ctypes.c_int)(library.mock_cuda_function(name.encode()))(*arguments) == 0, name

    def event(stream: ctypes.c_void_p) -> ctypes.c_void_p:
        made = pointer()
        cuda("cudaEventCreate", ctypes.byref(made))
        cuda("cudaEventRecord", made, stream)
        return made

    def replayed_us(rank: int) -> float:
        captures = mock.begin_capture()
        for _ in range(N_CALLS):
            where = ranks.communicators[rank]
            nccl.call(Collective.all_gather, where, ranks.buffers, COUNT, BFLOAT16, stream=captures)
        graph = mock.end_capture(captures)
        elapsed_ms, stream = ctypes.c_float(), pointer(captures)
        begin = event(stream)
        graph.launch()
        end = event(stream)
        cuda("cudaStreamSynchronize", stream)
        cuda("cudaEventElapsedTime", ctypes.byref(elapsed_ms), begin, end)
        graph.destroy()
        return 1e3 * elapsed_ms.value

    def slower_us() -> float:
        both: list[float] = []
        ranks.on_both(lambda rank: both.append(replayed_us(rank)))
        return max(both)

    def n_timed() -> int:
        ranks.plugin.set_observing(True)
        ranks.plugin.drain()
        for _ in range(N_CALLS):  # NCCL connects its profiler with the first that is observed
            ranks.call(Collective.all_gather)
        time.sleep(1.0)
        return int(np.count_nonzero(ranks.plugin.drain()["flags"] & FLAG_TIMED))

    n_before = n_timed()
    assert n_before >= N_CALLS
    on_us = slower_us()
    ranks.plugin.set_capturing(True)
    off_us = slower_us()
    ranks.plugin.set_capturing(False)
    found = [off_us, on_us, n_timed()]
    print(json.dumps(found), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
