"""Jobs that run out of device memory under NCCL's own choices, with and without the tuner.

Real processes on the emulated NCCL (fabric ethernet_boxes, 4 ranks), whose device is made so small that it does
not hold what NCCL would connect by default:

* connect: small messages run on one algorithm; for larger ones NCCL would connect another, which does not
  fit. The tuner sees the pressure and keeps new sizes on what is connected.
* channels: not even the first algorithm fits with the communicator's default channels, which NCCL connects
  all at once. `zerotune launch --nccl-memory-mb` leaves some out.
* anticipated: training holds nearly all memory, then lets go of it, and after some steps sends larger messages. The
  very first of these are to run with what was faster at smaller ones.

The peer is the same job untuned on a device with room for everything, in virtual time.

Run: python -m benchmarks memory_pressure [--quick] [--json]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.lib.reporting import Result, report
from zerotune.agent.nccl import fabric
from zerotune.store.records import Algorithm, CommunicatorClass
from zerotune.tuner.client.background_daemon import start_in_background

FABRIC = "ethernet_boxes"
SHAPE = CommunicatorClass(4, 4)
WORKER = Path(__file__).with_name("memory_pressure_worker.py")
OUT_OF_MEMORY = "DeviceOutOfMemory"
PAUSE_S = 0.05
FULL_STEPS = 400
N_LARGE = 100


class Scenario(NamedTuple):
    """Messages before and after, and the memory of the device."""

    small_bytes: int
    large_bytes: int
    device_mb: float
    options: tuple[str, ...] = ()
    reserved_mb: float = 0.0
    """What training holds as long as messages are small."""
    compute_us: float = 2000.0
    """Per step; four calls come besides."""


class StepTimes(NamedTuple):
    """Virtual microseconds of steps with large messages."""

    median_us: float
    first_calls_us: float
    """The calls of the first one."""


def scenarios() -> dict[str, Scenario]:
    boxes = fabric.load(FABRIC)
    n_channels = boxes.max_channels(SHAPE)
    tree_mb = boxes.memory_mb(SHAPE, {Algorithm.tree: n_channels})
    ring_mb = boxes.memory_mb(SHAPE, {Algorithm.ring: n_channels})
    tight_mb = 0.8 * ring_mb
    return {
        "connect": Scenario(4 << 10, 64 << 10, 1.05 * tree_mb),
        "channels": Scenario(16 << 10, 64 << 10, tight_mb, ("--nccl-memory-mb", str(0.95 * tight_mb))),
    }


def anticipation() -> Scenario:
    device_mb = fabric.load(FABRIC).memory.device_mb
    return Scenario(256 << 10, 512 << 10, device_mb, reserved_mb=0.95 * device_mb, compute_us=20_000.0)


def run(scenario: Scenario, endpoint: str, *, tuned: bool, tight: bool, n_steps: int) -> StepTimes | None:
    """Train with messages that become larger.

    Args:
        scenario: sizes and memory.
        endpoint: of the daemon.
        tuned: with the agent.
        tight: on a device with `scenario.device_mb`.
        n_steps: with small messages.

    Returns:
        Times of steps with large messages; None when the device was full.
    """
    command = [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--fabric", FABRIC, "--endpoint", endpoint]
    command += ["--agent", *scenario.options] if tuned else ["--no-agent"]
    command += ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(WORKER), str(scenario.small_bytes), str(scenario.large_bytes), str(n_steps), str(N_LARGE)]
    command += [str(PAUSE_S if tuned else 0.0), str(scenario.reserved_mb), str(scenario.compute_us)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZEROTUNE_COMPUTE": "none"}
    if tight:
        environment["ZEROTUNE_DEVICE_MB"] = str(scenario.device_mb)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        if OUT_OF_MEMORY in done.stderr:
            return None
        raise SystemExit(done.stderr)
    words = next(line.split() for line in done.stdout.splitlines() if line.startswith("step_us"))
    return StepTimes(float(words[1]), float(words[2]))


@contextmanager
def daemon() -> Iterator[str]:
    """Where a daemon with an empty store answers."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/d.sock"
        process = start_in_background(endpoint, Path(folder) / "store.db", idle_exit_s=600)
        try:
            yield endpoint
        finally:
            psutil.Process(process.pid).terminate()
            process.wait()


def anticipated() -> Result:
    """What the calls of the first step with larger messages take, against NCCL's own choice."""
    scenario = anticipation()
    with daemon() as endpoint:
        untuned = run(scenario, endpoint, tuned=False, tight=True, n_steps=FULL_STEPS)
        tuned = run(scenario, endpoint, tuned=True, tight=True, n_steps=FULL_STEPS)
    if untuned is None or tuned is None:
        raise SystemExit("a device of the fabric's own size is too small")
    ratio = tuned.first_calls_us / untuned.first_calls_us
    return Result("anticipated_first_calls_saved_percent", 100.0 * (1.0 - ratio), "%", "> 0", "untuned", ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="ends within 60 s; nothing is anticipated")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    n_steps = 160 if arguments.quick else FULL_STEPS
    results = []
    peer = "untuned, with room"
    for name, scenario in scenarios().items():
        with daemon() as endpoint:
            roomy = run(scenario, endpoint, tuned=False, tight=False, n_steps=n_steps)
            untuned = run(scenario, endpoint, tuned=False, tight=True, n_steps=n_steps)
            tuned = run(scenario, endpoint, tuned=True, tight=True, n_steps=n_steps)
        if roomy is None:
            raise SystemExit(f"{name}: a device of the fabric's own size is too small")
        results.append(Result(f"{name}_untuned_completes", float(untuned is not None), "0 or 1", "0"))
        results.append(Result(f"{name}_tuned_completes", float(tuned is not None), "0 or 1", "1"))
        if tuned is not None:
            ratio = tuned.median_us / roomy.median_us
            results.append(Result(f"{name}_slowdown_percent", 100.0 * (ratio - 1.0), "%", "<= 2", peer, ratio))
    if not arguments.quick:
        results.append(anticipated())
    report("memory_pressure", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
