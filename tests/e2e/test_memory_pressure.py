"""Real training processes that would run out of device memory: untuned they do, under the tuner they do not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from zerotune.agent.nccl import fabric
from zerotune.store.records import Algorithm, CommunicatorClass
from zerotune.tuner.client.background_daemon import start_in_background

FABRIC = "ethernet_boxes"
SHAPE = CommunicatorClass(4, 4)
JOB = Path(__file__).with_name("memory_pressure_job.py")
N_SMALL, N_LARGE = 160, 100
PAUSE_S = 0.05
"""After each step of a tuned job: the daemon lives in real time, the steps in virtual time."""


class Scenario(NamedTuple):
    """Messages before and after, and a device that does not hold what NCCL would connect by default."""

    small_bytes: int
    large_bytes: int
    device_mb: float
    options: tuple[str, ...] = ()


def connect() -> Scenario:
    """Larger messages would connect another algorithm, which does not fit."""
    boxes = fabric.load(FABRIC)
    return Scenario(4 << 10, 64 << 10, 1.05 * boxes.memory_mb(SHAPE, {Algorithm.tree: boxes.max_channels(SHAPE)}))


def channels() -> Scenario:
    """Not even the first algorithm fits with all channels; `--nccl-memory-mb` leaves some out."""
    boxes = fabric.load(FABRIC)
    tight_mb = 0.8 * boxes.memory_mb(SHAPE, {Algorithm.ring: boxes.max_channels(SHAPE)})
    return Scenario(16 << 10, 64 << 10, tight_mb, ("--nccl-memory-mb", str(round(0.95 * tight_mb, 3))))


@pytest.fixture
def endpoint() -> Iterator[str]:
    """Where a daemon with an empty store answers; paths of sockets are short."""
    with tempfile.TemporaryDirectory(prefix="zt-") as folder:
        address = f"ipc://{folder}/d.sock"
        process = start_in_background(address, Path(folder) / "store.db", idle_exit_s=600)
        yield address
        psutil.Process(process.pid).terminate()
        process.wait()


def step_us(scenario: Scenario, endpoint: str, *, tuned: bool, tight: bool) -> float | None:
    """Median virtual microseconds of steps with large messages; None when the device was full."""
    command = [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--fabric", FABRIC, "--endpoint", endpoint]
    command += ["--agent", *scenario.options] if tuned else ["--no-agent"]
    command += ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    command += [str(JOB), str(scenario.small_bytes), str(scenario.large_bytes), str(N_SMALL), str(N_LARGE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ZEROTUNE_COMPUTE": "none"}
    if tight:
        environment["ZEROTUNE_DEVICE_MB"] = str(scenario.device_mb)
    command.append(str(PAUSE_S if tuned else 0.0))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        assert "DeviceOutOfMemory" in done.stderr, done.stderr[-3000:]
        return None
    return next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step_us"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", [connect(), channels()], ids=["connect", "channels"])
def test_jobs_that_run_out_of_memory_complete_under_the_tuner(scenario: Scenario, endpoint: str) -> None:
    roomy_us = step_us(scenario, endpoint, tuned=False, tight=False)
    assert roomy_us is not None
    assert step_us(scenario, endpoint, tuned=False, tight=True) is None
    tuned_us = step_us(scenario, endpoint, tuned=True, tight=True)
    assert tuned_us is not None
    assert tuned_us <= 1.02 * roomy_us
