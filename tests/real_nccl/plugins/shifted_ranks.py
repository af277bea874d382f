"""Two ranks on a mock GPU that counts as real kernels do. Prints what was recorded.

shifted_ranks.py LIBNCCL FOLDER CALL: `broadcast`, which NCCL 2.31 and newer tell no profiler of, or `all_gather`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from two_ranks import TwoRanks

from zerotune.store.records import Collective

FIRST_US, UNSEEN_US, SEEN_US = 400.0, 25.0, 50.0
N_UNSEEN, N_SEEN = 20, 3


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ranks = TwoRanks(Path(sys.argv[1]), Path(sys.argv[2]), FIRST_US, counts_unwatched=True)
    ranks.call(Collective[sys.argv[3]])
    ranks.mock.set_duration_us(UNSEEN_US)
    for _ in range(N_UNSEEN):
        ranks.call(Collective.all_gather)
    ranks.mock.set_duration_us(SEEN_US)
    ranks.plugin.set_observing(True)
    for _ in range(N_SEEN):
        time.sleep(0.05)  # as at a step's end: NCCL tells of all that ran before
        ranks.call(Collective.all_gather)
    ranks.wait_for(2 * N_SEEN)
    records, n_impossible = ranks.plugin.drain(), ranks.plugin.passages().n_impossible_times
    print(json.dumps({"records": records.tobytes().hex(), "n_impossible_times": n_impossible}), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
