"""Jobs that run out of device memory under NCCL's own choices, with and without the tuner.

Real processes on the emulated NCCL (fabric ethernet_boxes, 4 ranks), whose device is made so small that it does
not hold what NCCL would connect by default:

* connect: small messages run on one algorithm; for larger ones NCCL would connect another, which does not
  fit. The tuner sees the pressure and keeps new sizes on what is connected.
* channels: not even the first algorithm fits with the communicator's default channels, which NCCL connects
  all at once. `zerotune launch --nccl-memory-mb` leaves some out.

The peer is the same job untuned on a device with room for everything, in virtual time.

Run: python benchmarks/memory_pressure.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import psutil
from reporting import Result, report

from agent.nccl import fabric
from store.records import Algorithm, CommunicatorClass
from tuner.background import start_in_background

FABRIC = "ethernet_boxes"
SHAPE = CommunicatorClass(4, 4)
WORKER = Path(__file__).with_name("memory_pressure_worker.py")
OUT_OF_MEMORY = "DeviceOutOfMemory"
PAUSE_S = 0.05


class Scenario(NamedTuple):
    """Messages before and after, and the memory of the device."""

    small_bytes: int
    large_bytes: int
    device_mb: float
    options: tuple[str, ...]


def scenarios() -> dict[str, Scenario]:
    boxes = fabric.load(FABRIC)
    n_channels = boxes.max_channels(SHAPE)
    tree_mb = boxes.memory_mb(SHAPE, {Algorithm.tree: n_channels})
    ring_mb = boxes.memory_mb(SHAPE, {Algorithm.ring: n_channels})
    tight_mb = 0.8 * ring_mb
    return {
        "connect": Scenario(4 << 10, 64 << 10, 1.05 * tree_mb, ()),
        "channels": Scenario(16 << 10, 64 << 10, tight_mb, ("--nccl-memory-mb", str(0.95 * tight_mb))),
    }


def run(scenario: Scenario, endpoint: str, *, tuned: bool, tight: bool, n_steps: int) -> float | None:
    """Virtual microseconds of a step with large messages; None when the device was full."""
    command = [sys.executable, "-m", "tuner.cli", "launch", "--fabric", FABRIC, "--endpoint", endpoint]
    command += ["--agent", *scenario.options] if tuned else ["--no-agent"]
    command += ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(WORKER), str(scenario.small_bytes), str(scenario.large_bytes), str(n_steps), "100"]
    command += [str(PAUSE_S if tuned else 0.0)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZEROTUNE_COMPUTE": "none"}
    if tight:
        environment["ZEROTUNE_DEVICE_MB"] = str(scenario.device_mb)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        if OUT_OF_MEMORY in done.stderr:
            return None
        raise SystemExit(done.stderr)
    words = next(line.split() for line in done.stdout.splitlines() if line.startswith("step_us"))
    return float(words[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ends within 60 s")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    n_steps = 160 if arguments.quick else 400
    results = []
    for name, scenario in scenarios().items():
        with tempfile.TemporaryDirectory() as folder:
            endpoint = f"ipc://{folder}/d.sock"
            daemon = start_in_background(endpoint, Path(folder) / "store.db", idle_exit_s=600)
            try:
                roomy_us = run(scenario, endpoint, tuned=False, tight=False, n_steps=n_steps)
                untuned_us = run(scenario, endpoint, tuned=False, tight=True, n_steps=n_steps)
                tuned_us = run(scenario, endpoint, tuned=True, tight=True, n_steps=n_steps)
            finally:
                psutil.Process(daemon.pid).terminate()
                daemon.wait()
        if roomy_us is None:
            raise SystemExit(f"{name}: a device of the fabric's own size is too small")
        peer = "untuned, with room"
        results.append(Result(f"{name}_untuned_completes", float(untuned_us is not None), "0 or 1", "0"))
        results.append(Result(f"{name}_tuned_completes", float(tuned_us is not None), "0 or 1", "1"))
        if tuned_us is not None:
            slowdown = 100.0 * (tuned_us / roomy_us - 1.0)
            results.append(Result(f"{name}_slowdown_percent", slowdown, "%", "<= 2", peer, tuned_us / roomy_us))
    report("memory_pressure", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
