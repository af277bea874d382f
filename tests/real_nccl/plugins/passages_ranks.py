"""Two ranks on the mock GPU that call what a tuner is asked about, and what it is not; prints what the plugin saw.

passages_ranks.py LIBNCCL FOLDER
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from two_ranks import COUNT, TwoRanks

from zerotune.agent.nccl.libnccl import BFLOAT16
from zerotune.store.records import Collective

SEEN_US, UNSEEN_US = 25.0, 400.0


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ranks = TwoRanks(Path(sys.argv[1]), Path(sys.argv[2]))
    plugin, nccl, buffers = ranks.plugin, ranks.nccl, ranks.buffers
    send, receive = nccl.library.ncclSend, nccl.library.ncclRecv
    for call in (send, receive):
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(2 * [ctypes.c_int]), *(2 * [ctypes.c_void_p]))

    def exchange(rank: int) -> None:
        with nccl.group():
            send(buffers[0], COUNT, BFLOAT16, 1 - rank, ranks.communicators[rank], None)
            receive(buffers[1], COUNT, BFLOAT16, 1 - rank, ranks.communicators[rank], None)

    for _ in range(2):  # what ran unseen must not lend its times, nor shift some channels more than others
        plugin.set_observing(False)
        ranks.mock.set_duration_us(UNSEEN_US)
        ranks.call(Collective.all_gather)
        ranks.call(Collective.all_gather, count=2)
        ranks.on_both(exchange)
        plugin.set_observing(True)
        ranks.mock.set_duration_us(SEEN_US)
        ranks.call(Collective.all_gather)
        ranks.on_both(exchange)
    ranks.mock.set_device(0)
    alone = nccl.init_rank(1, nccl.unique_id(), 0)
    nccl.call(Collective.all_gather, alone, buffers, COUNT, BFLOAT16)
    ranks.wait_for(4)
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
