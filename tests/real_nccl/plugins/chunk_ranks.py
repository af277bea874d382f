"""Two ranks under plans that name chunk sizes; prints the chunks that NCCL launched with, in grains, and recorded ones.

chunk_ranks.py LIBNCCL FOLDER ASKS: `yes` has NCCL ask for chunk sizes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from two_ranks import COUNT, TwoRanks

from zerotune.agent.nccl import library
from zerotune.agent.nccl.libnccl import BFLOAT16
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Plan, PlanRow, Protocol

SMALL = COUNT >> 1
FLOAT16 = 6
"""ncclDataType_t: NCCL decides on calls of another type by themselves."""
N_LEAD = 2
TELLS_TIMES = 4
"""Version of the profiler interface from which on kernels are timed."""
KIB = 1024
OWN = Candidate(Algorithm.ring, Protocol.simple, 4)
SETTINGS = {
    "own": OWN,
    "simple": Candidate(Algorithm.ring, Protocol.simple, 4, 64 * KIB),
    "beyond buffers": Candidate(Algorithm.ring, Protocol.simple, 4, 32 * KIB * KIB),
    "ll": Candidate(Algorithm.ring, Protocol.ll, 4, 16 * KIB),
    "ll128": Candidate(Algorithm.ring, Protocol.ll128, 4, 32 * KIB),
    "least of ll128": Candidate(Algorithm.ring, Protocol.ll128, 4, 4 * KIB),
    "tree": Candidate(Algorithm.tree, Protocol.simple, 4, 48 * KIB),
    "own again": OWN,
}


def row(candidate: Candidate, count: int) -> PlanRow:
    return PlanRow(CommunicatorClass(2, 1), Collective.all_reduce, None, 2 * count, 2 * count, candidate)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library.load().ask_chunk_sizes(sys.argv[3] == "yes")
    ranks = TwoRanks(Path(sys.argv[1]), Path(sys.argv[2]))
    plugin, mock = ranks.plugin, ranks.mock
    mock.set_recording(True)
    plugin.set_recording(True)
    plugin.set_observing(True)
    epoch = 0

    def adopt(*rows: PlanRow) -> None:
        nonlocal epoch
        epoch += 1
        plugin.load_plan(Plan(epoch, rows))
        assert plugin.flip(epoch)

    def launched() -> list[int]:
        """Chunks of the works since, on both devices alike."""
        works = mock.drain()
        both = [works["chunk_grains"][works["device"] == device].tolist() for device in (0, 1)]
        assert both[0] == both[1], both
        return both[0]

    ranks.call(Collective.all_reduce)
    found: dict[str, object] = {"no plan": launched()}
    ranks.wait_for(2 * (plugin.profiler_abi() >= TELLS_TIMES))
    plugin.drain()
    for name, candidate in SETTINGS.items():
        adopt(row(candidate, COUNT))
        n_timed = plugin.counters().n_timed + 2 * (plugin.profiler_abi() >= TELLS_TIMES)
        ranks.call(Collective.all_reduce)
        ranks.wait_for(n_timed)
        assert plugin.counters().n_timed == n_timed, name
        records = plugin.drain()
        cells = {(int(one["algorithm"]), int(one["protocol"])) for one in records}
        assert cells == {(candidate.algorithm, candidate.protocol)}, name
        found[name] = [*launched(), *{int(one["chunk_bytes"]) for one in records}]

    def group(rank: int) -> None:
        with ranks.nccl.group():
            for count, datatype in ((COUNT, BFLOAT16), (SMALL, FLOAT16)):
                ranks.nccl.call(Collective.all_reduce, ranks.communicators[rank], ranks.buffers, count, datatype)

    chunked = [Candidate(Algorithm.ring, Protocol.simple, 4, kib * KIB) for kib in (64, 128)]
    for name, candidates in (("group", chunked), ("group alike", chunked[:1] * 2), ("group own", [OWN, OWN])):
        adopt(*(row(one, count) for one, count in zip(candidates, (COUNT, SMALL), strict=True)))
        ranks.on_both(group)
        found[name] = launched()

    # By agreement: each rank switches at the same call, whenever that is.
    plugin.prepare(Plan(99, (row(SETTINGS["simple"], COUNT),)))
    owners = plugin.communicators()["owner"].tolist()
    calls = [plugin.promise(owner, N_LEAD) for owner in owners]
    assert len(owners) == 2
    assert calls[0] == calls[1]
    for owner in owners:
        assert plugin.commit(owner, [max(calls) + 1])
    plugin.prepare_end()
    for _ in range(N_LEAD + 2):
        ranks.call(Collective.all_reduce)
    found["switch"] = launched()
    found["asks"] = plugin.asks_chunk_sizes()
    print(json.dumps(found), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
