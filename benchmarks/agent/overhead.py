"""What the agent costs a training step when there is nothing to tune.

Run: python -m benchmarks overhead [--quick] [--json]

Accounting: wall time in the agent's hooks and boundaries, plus all CPU time of its background threads, over the median
step. Confirmation: median step of interleaved runs with and without the agent. If ranks take all cores, it also has the
cost of the daemon and of the emulation's profiler events.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import psutil

from benchmarks.lib.reporting import Result, options_of, report
from zerotune.tuner.client.background_daemon import start_in_background

FABRIC = "as_believed"
WORKER = Path(__file__).parent / "overhead_worker.py"


def run(folder: Path, endpoint: str, *, agent: bool, n_steps: int) -> dict[str, float]:
    out = folder / "out.json"
    command = [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--fabric", FABRIC, "--endpoint", endpoint]
    command += ["--agent" if agent else "--no-agent", "--"]
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(WORKER), str(out), "--stage", "3", "--batch", "8", "--steps", str(n_steps)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(out.read_text())
    return found


def main() -> None:
    parser = options_of(__doc__, quick="ends within 60 s")
    arguments = parser.parse_args()
    n_pairs, n_steps = (1, 70) if arguments.quick else (7, 200)
    on: list[dict[str, float]] = []
    off: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        endpoint = f"ipc://{folder}/d.sock"
        daemon = start_in_background(endpoint, folder / "store.db")
        try:
            # Nothing to tune: an earlier job taught the tuner that NCCL's choices are the best.
            run(folder, endpoint, agent=True, n_steps=n_steps)
            for pair in range(n_pairs):
                order = ((True, on), (False, off)) if pair % 2 else ((False, off), (True, on))
                for agent, results in order:
                    results.append(run(folder, endpoint, agent=agent, n_steps=n_steps))
                print(f"pair {pair + 1} of {n_pairs} done", file=sys.stderr)
        finally:
            psutil.Process(daemon.pid).terminate()
            daemon.wait()
    on_us, off_us = median(r["step_us"] for r in on), median(r["step_us"] for r in off)
    accounted = median(100 * r["agent_us_per_step"] / r["step_us"] for r in on)
    paired = median(100 * (a["step_us"] / b["step_us"] - 1) for a, b in zip(on, off, strict=True))
    base = median(r["rss_mb"] for r in off)
    report(
        "overhead",
        [
            Result("step_overhead_percent", accounted, "% (accounting)", "<= 0.5", "step, wall", accounted / 100),
            Result("step_overhead_percent_ab", paired, "% (A/B)", "<= 0.5", "agent absent", on_us / off_us),
            Result("boundary_p50_us", median(r["boundary_p50_us"] for r in on), "us", "<= 50"),
            Result("training_thread_us_per_step", median(r["training_us_per_step"] for r in on), "us"),
            Result("step_us", on_us, "us", "", "agent absent", on_us / off_us),
            Result("added_memory_mb", median(r["rss_mb"] for r in on) - base, "MB", "<= 30", "agent absent"),
            Result("added_start_s", median(r["agent_start_s"] for r in on), "s", "<= 0.3"),
        ],
        as_json=arguments.json,
    )


if __name__ == "__main__":
    main()
