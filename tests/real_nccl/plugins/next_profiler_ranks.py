"""Two ranks whose NCCL tells our profiler and another of what runs; prints what each saw.

next_profiler_ranks.py LIBNCCL FOLDER OTHER
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from two_ranks import PATIENCE_S, TwoRanks

from zerotune.store.records import Collective

COLLECTIVE, KERNEL_CHANNEL = 2, 64
N_CALLS = 6


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["ZEROTUNE_NEXT_PROFILER"] = sys.argv[3]
    other = ctypes.CDLL(sys.argv[3])
    ctypes.c_int.in_dll(other, "other_mask").value = COLLECTIVE | KERNEL_CHANNEL
    ranks = TwoRanks(Path(sys.argv[1]), Path(sys.argv[2]))

    def seen(name: str) -> int:
        return ctypes.c_int.in_dll(other, f"other_{name}").value

    def its(n_channels: int) -> list[int]:
        """Collectives and channels that the other was told of, once it knows of so many channels and nothing runs."""
        told = (ctypes.c_int * 16).in_dll(other, "other_n_of_type")
        deadline_s = time.monotonic() + PATIENCE_S
        while told[6] < n_channels or seen("n_stops") < seen("n_starts"):
            if time.monotonic() >= deadline_s:
                break
            time.sleep(0.01)
        return [told[1], told[6], seen("n_starts") - seen("n_stops")]

    ranks.call(Collective.all_reduce)
    found: dict[str, object] = {"n_calls_alone": its(0)[0], "records_alone": len(ranks.plugin.drain())}
    ranks.plugin.set_observing(True)
    for _ in range(N_CALLS):
        ranks.call(Collective.all_reduce)
    ranks.wait_for(2 * N_CALLS)
    records = ranks.plugin.drain()
    found["n_timed"] = len(records)
    n_channels = int(records["n_channels"].sum()) * (N_CALLS + 1) // N_CALLS
    found["both"], found["n_channels"] = its(n_channels), n_channels
    found["durations_us"] = sorted({round(float(each["duration_us"]), 1) for each in records})
    found["name"] = ranks.plugin.next_profiler()
    ranks.on_both(lambda rank: ranks.nccl.destroy(ranks.communicators[rank]))
    found["n_inits"], found["n_ends"] = seen("n_inits"), seen("n_ends")
    found["n_faults"] = ranks.plugin.counters().n_next_profiler_faults
    print(json.dumps(found), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
