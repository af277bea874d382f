"""Two ranks on the mock GPU that call what a tuner is asked about, and what it is not; prints what the plugin saw.

Run as a process of its own, since the mock takes the place of CUDA in it: passages_ranks.py LIBNCCL FOLDER
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from pathlib import Path

from zerotune.agent.nccl import library
from zerotune.agent.nccl.libnccl import BFLOAT16, Libnccl
from zerotune.agent.nccl.mock_cuda.machine import read_machine
from zerotune.agent.nccl.mock_cuda.mock import MockCuda
from zerotune.agent.nccl.twin.machines import MACHINES
from zerotune.store.records import Collective

COUNT = 1 << 18
PATIENCE_S = 5.0


def main() -> None:
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    topology = folder / "topology.xml"
    topology.write_text(MACHINES["dgx_h100"].topology())
    mock = MockCuda()
    mock.lend(read_machine(topology), "node")
    plugin = library.load()
    os.environ.update(NCCL_TUNER_PLUGIN=plugin.path.name, NCCL_PROFILER_PLUGIN=plugin.path.name)
    nccl = Libnccl(path)
    mock.attach(path, nccl.library, nccl.version)
    mock.set_duration_us(25.0)
    send, receive = nccl.library.ncclSend, nccl.library.ncclRecv
    for call in (send, receive):
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(2 * [ctypes.c_int]), *(2 * [ctypes.c_void_p]))
    unique_id, communicators = nccl.unique_id(), [0, 0]
    buffers = (mock.malloc(4 * COUNT), mock.malloc(4 * COUNT))

    def on_both_ranks(work) -> None:
        def run(rank: int) -> None:
            mock.set_device(rank)
            work(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def connect(rank: int) -> None:
        communicators[rank] = nccl.init_rank(2, unique_id, rank)

    def gather(rank: int) -> None:
        nccl.call(Collective.all_gather, communicators[rank], buffers, COUNT, BFLOAT16)

    def exchange(rank: int) -> None:
        with nccl.group():
            send(buffers[0], COUNT, BFLOAT16, 1 - rank, communicators[rank], None)
            receive(buffers[1], COUNT, BFLOAT16, 1 - rank, communicators[rank], None)

    on_both_ranks(connect)
    plugin.set_observing(True)
    on_both_ranks(gather)
    on_both_ranks(exchange)
    mock.set_device(0)
    alone = nccl.init_rank(1, nccl.unique_id(), 0)
    nccl.call(Collective.all_gather, alone, buffers, COUNT, BFLOAT16)
    deadline_s = time.monotonic() + PATIENCE_S
    while plugin.counters().n_timed < 2 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    passages = plugin.passages()
    seen = {each.kind.name: [each.n_calls, each.message_bytes, each.n_timed, each.kernel_us] for each in passages.kinds}
    found = {
        "profiler_abi": plugin.profiler_abi(),
        "tuner_abi": plugin.tuner_abi(),
        "seen": seen,
        "one_rank_communicators": passages.n_one_rank_communicators,
    }
    print(json.dumps(found), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
