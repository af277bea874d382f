"""Two ranks with NCCL Inspector beside ours, in the real NCCL on the mock; prints what ours saw.

inspector_ranks.py LIBNCCL FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from two_ranks import TwoRanks

from zerotune.store.records import Collective

N_OBSERVED, N_BESIDE = 20, 3


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ranks = TwoRanks(Path(sys.argv[1]), Path(sys.argv[2]))
    ranks.call(Collective.all_gather)
    ranks.plugin.set_observing(True)
    for _ in range(N_OBSERVED):
        ranks.call(Collective.all_reduce)
    ranks.wait_for(2 * N_OBSERVED)
    ranks.plugin.set_observing(False)
    for _ in range(N_BESIDE):
        ranks.call(Collective.reduce_scatter)
    time.sleep(0.5)  # it has a thread of its own that writes
    found = {"name": ranks.plugin.next_profiler(), "n_timed": len(ranks.plugin.drain())}
    ranks.on_both(lambda rank: ranks.nccl.destroy(ranks.communicators[rank]))
    found["n_faults"] = ranks.plugin.counters().n_next_profiler_faults
    print(json.dumps(found), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
