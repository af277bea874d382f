"""Two ranks whose NCCL is descheduled while they call, on a GPU whose timer ticks. Prints what was recorded.

late_ranks.py LIBNCCL FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from two_ranks import COUNT, TwoRanks

from zerotune.agent.nccl.libnccl import BFLOAT16
from zerotune.store.records import Collective

N_CALLS, AWAY_MS, TICK_NS, KERNEL_US = 200, 100.0, 1000, 2.0
"""More calls than NCCL's ring of times has entries, within the time that its threads are away."""


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ranks = TwoRanks(Path(sys.argv[1]), Path(sys.argv[2]), KERNEL_US)
    ranks.call(Collective.all_gather)  # connects
    ranks.mock.set_timer_step_ns(TICK_NS)
    ranks.plugin.set_observing(True)
    ranks.call(Collective.all_gather)  # NCCL connects its profiler with the first that is observed
    ranks.wait_for(2)
    ranks.plugin.drain()
    ranks.mock.set_away_ms(AWAY_MS)
    time.sleep(2 * AWAY_MS / 1e3)
    spans: list[list[tuple[int, int]]] = [[], []]

    def call(rank: int) -> None:
        for _ in range(N_CALLS):
            begin_ns = time.monotonic_ns()
            ranks.nccl.call(Collective.all_gather, ranks.communicators[rank], ranks.buffers, COUNT, BFLOAT16)
            spans[rank].append((begin_ns, time.monotonic_ns()))

    ranks.on_both(call)
    ranks.wait_for(2 + 2 * N_CALLS)
    records, counters = ranks.plugin.drain(), ranks.plugin.counters()
    found = {"records": records.tobytes().hex(), "n_impossible_times": counters.n_impossible_times, "spans": spans}
    print(json.dumps(found), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
