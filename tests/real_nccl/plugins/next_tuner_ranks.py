"""Two ranks whose NCCL asks our tuner, which asks another; prints what ran after each answer.

next_tuner_ranks.py LIBNCCL FOLDER OTHER
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from two_ranks import COUNT, TwoRanks

from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol

NOTHING, CELL, ERROR = 0, 1, 3
"""What the other answers: benchmarks/nccl/other_tuner.c."""


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["ZEROTUNE_NEXT_TUNER"] = sys.argv[3]
    other = ctypes.CDLL(sys.argv[3])
    ranks = TwoRanks(Path(sys.argv[1]), Path(sys.argv[2]))
    plugin = ranks.plugin
    plugin.set_observing(True)
    n_timed = 0

    def answers(answer: int, algorithm: Algorithm = Algorithm.ring, protocol: Protocol = Protocol.ll) -> None:
        for name, value in (("answer", answer), ("algorithm", algorithm), ("protocol", protocol), ("channels", 2)):
            ctypes.c_int.in_dll(other, f"other_{name}").value = value

    def ran() -> list[int]:
        nonlocal n_timed
        ranks.call(Collective.all_reduce)
        n_timed += 2
        ranks.wait_for(n_timed)
        first, second = (
            tuple(map(int, (each["algorithm"], each["protocol"], each["n_channels"]))) for each in plugin.drain()
        )
        assert first == second
        return list(first)

    found: dict[str, object] = {"nothing": ran()}
    answers(CELL)
    found["cell"] = ran()
    answers(CELL, Algorithm.tree, Protocol.simple)
    found["another_cell"] = ran()
    answers(ERROR)
    found["error"] = ran()
    answers(CELL)
    candidate = Candidate(Algorithm.tree, Protocol.ll, 4)
    row = PlanRow(CommunicatorClass(2, 1), Collective.all_reduce, Phase.other, 2 * COUNT, 2 * COUNT, candidate)
    plugin.load_plan(Plan(epoch=1, rows=(row,)))
    plugin.flip(1)
    found["plan"] = ran()
    found["name"] = plugin.next_tuner()
    found["n_faults"] = plugin.counters().n_next_tuner_faults
    found["n_communicators"] = ctypes.c_int.in_dll(other, "other_n_inits").value
    print(json.dumps(found), file=out, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
