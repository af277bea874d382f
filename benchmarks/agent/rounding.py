"""Whether results keep their bits while collectives are tuned, if NCCL's order of addition depends on the setting.

The emulation does so under `ZEROTUNE_SUMS=by_setting`. A plan file asks for other settings of gathers and scatters. Run
as a script it is a rank, which keeps the results of its collectives.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.gpu.ranks import Machine, Ranks

N_RANKS: Final = 4
"""Two summands have one order only."""
N_STEPS: Final = 300
PAUSE_S: Final = 0.005
"""Of a step: the ranks adopt the plan meanwhile."""
N_ELEMENTS: Final = 4096
FABRIC: Final = "ethernet_boxes"
WAIT_S: Final = 300.0
ROW: Final = {
    "n_ranks": N_RANKS, "n_nodes": N_RANKS, "min_bytes": 1, "max_bytes": 10**9,
    "algorithm": "ring", "protocol": "simple", "n_channels": 1,
}  # fmt: skip


def computed(folder: Path, *options: str) -> tuple[np.ndarray, int]:
    """Raises RanksFailed."""
    launch = [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--fabric", FABRIC]
    launch += ["--endpoint", f"ipc://{folder}/nobody.sock", "--summary", str(folder / "summary.json"), *options, "--"]
    command = [*launch, sys.executable, "-m", "benchmarks.agent.rounding", str(folder / "computed.npy")]
    told = {"ZEROTUNE_SUMS": "by_setting", "ZEROTUNE_JOB_ID": "rounding"}
    Ranks(Machine(FABRIC, N_RANKS), command, folder, extra=told).wait(WAIT_S)
    steps = json.loads((folder / "summary.json").read_text())["steps"]
    return np.load(folder / "computed.npy"), int(steps[-1]["epoch"])


def bits_changed(folder: Path) -> tuple[int, int]:
    """Bits of results that a plan changes, and all bits. Raises RuntimeError if the plan did not come into force."""
    plan = folder / "plan.json"
    rows = [{**ROW, "collective": collective} for collective in ("all_gather", "reduce_scatter")]
    plan.write_text(json.dumps({"zerotune_plan": 1, "rows": rows}))
    own, _ = computed(folder / "own", "--no-agent")
    changed: list[int] = []
    for options in (("--numerics", "exact"), ()):
        found, epoch = computed(folder / f"tuned{len(changed)}", "--plan", str(plan), *options)
        if not epoch:
            raise RuntimeError("the plan did not come into force")
        changed.append(int(np.unpackbits(own.view(np.uint8) ^ found.view(np.uint8)).sum()))
    return changed[0], changed[1]


def main() -> None:
    import torch
    import torch.distributed as dist

    import zerotune

    dist.init_process_group()
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    part, whole, kept = torch.empty(N_ELEMENTS), torch.empty(N_ELEMENTS * n_ranks), []
    for _ in range(N_STEPS):
        dist.reduce_scatter_tensor(part, torch.randn(N_ELEMENTS * n_ranks, generator=draw))
        dist.all_gather_into_tensor(whole, part)
        kept.append(whole[:: n_ranks * 8].numpy().copy())
        time.sleep(PAUSE_S)
        zerotune.step_ended()
    if rank == 0:
        np.save(sys.argv[1], np.stack(kept))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
