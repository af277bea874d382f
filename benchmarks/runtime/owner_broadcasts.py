"""Stage 3 gathering by its owners' broadcasts, beside all-gather: volume, calls and time.

    python -m benchmarks owner_broadcasts [--quick] [--json]

Bytes and calls per step of rank 0, as the emulated NCCL counts them; time of a step on its virtual clock (h100_node),
and over gloo the processor time of all ranks on this machine, where medians of interleaved steps are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.lib.reporting import Result, report


def measure(backend: str, n_ranks: int, n_steps: int) -> dict[str, dict[str, float]]:
    """Figures of a step by way of gathering.

    Args:
        backend: "emulated_nccl" or "gloo".
        n_ranks: of the job.
        n_steps: measured ones.

    Returns:
        By "all_gather" and "broadcast": what the worker says.

    Raises:
        RuntimeError: the worker failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    command += ["-m", "benchmarks.runtime.owner_broadcasts_worker", backend, str(n_steps)]
    environment = {
        **os.environ, "ZEROTUNE_FABRIC": "h100_node", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith("figures "):
            found: dict[str, dict[str, float]] = json.loads(line.partition(" ")[2])
            return found
    raise RuntimeError(f"no figures from {' '.join(command)}: {done.stderr[-500:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps; ends within 60 s")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    options = parser.parse_args()
    results = []
    for n_ranks in (2, 4) if options.quick else (2, 4, 8):
        virtual = measure("emulated_nccl", n_ranks, 3)
        ours, plain = virtual["broadcast"], virtual["all_gather"]
        for name in ("bytes", "calls", "virtual_us"):
            ratio = ours[name] / plain[name]
            target = "<= 1.0" if name == "bytes" else ""
            beside = f"all_gather: {plain[name]:.0f}"
            results.append(Result(f"{name}_ratio@{n_ranks}_ranks", ratio, "", target, beside, ratio))
    for n_ranks in (2,) if options.quick else (2, 4):
        busy = measure("gloo", n_ranks, 10 if options.quick else 40)
        ratio = busy["broadcast"]["cpu_ms"] / busy["all_gather"]["cpu_ms"]
        beside = f"all_gather: {busy['all_gather']['cpu_ms']:.1f} ms"
        results.append(Result(f"gloo_cpu_ratio@{n_ranks}_ranks", ratio, "", "", beside, ratio))
    report("owner_broadcasts", results, as_json=options.json)


if __name__ == "__main__":
    main()
