"""Memory pressure: how much of the device's memory is in use, 0 to 1.

NCCL allocates from the driver, so it cannot use memory that torch has reserved: that counts as in use. The share that
torch has reserved but does not use is reported separately, since the user can release it.

On a GPU the device's memory counts (by NVML, else torch). On the CPU the cgroup's limit counts if there is one, else
this process's resident memory against the machine's. The training thread never samples it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class DeviceMemory:
    """Functions that sample how full a device is."""

    pressure: Callable[[], float | None]
    """Memory in use over total; None: unknown."""
    cached_share: Callable[[], float] = lambda: 0.0
    """Share of the total that torch has reserved and does not use."""


def device_memory_here() -> DeviceMemory:
    """Samples this process's device."""
    if not torch.cuda.is_available():
        return DeviceMemory(cpu_source(CGROUP_ROOT))
    device = torch.cuda.current_device()
    total_bytes = torch.cuda.get_device_properties(device).total_memory

    def cached_share() -> float:
        unused_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(max(0, unused_bytes) / total_bytes)

    return DeviceMemory(_gpu_source(device), cached_share)


def _gpu_source(device: int) -> Callable[[], float | None]:
    try:
        import pynvml

        pynvml.nvmlInit()
        # NVML numbers all GPUs, torch only the visible ones: the UUID is the same in both.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

        def sample() -> float | None:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            return float(memory.used / memory.total)

        sample()
        return sample
    except Exception:  # there is no NVML, or the device is a MIG slice or a vGPU: torch asks the driver

        def sample() -> float | None:
            free, total = torch.cuda.mem_get_info(device)
            return 1.0 - free / total

        return sample


def cpu_source(cgroup: Path) -> Callable[[], float | None]:
    """Memory pressure without a GPU: of the control group below `cgroup`, else of the machine."""
    for used_file, limit_file in (
        (cgroup / "memory.current", cgroup / "memory.max"),
        (cgroup / "memory/memory.usage_in_bytes", cgroup / "memory/memory.limit_in_bytes"),
    ):
        limit_bytes = _read_bytes(limit_file)
        # cgroup v1 writes "no limit" as a number near 2^63.
        if limit_bytes and limit_bytes < 2**60 and _read_bytes(used_file) is not None:

            def sample(used_file: Path = used_file, limit_bytes: int = limit_bytes) -> float | None:
                used_bytes = _read_bytes(used_file)
                return None if used_bytes is None else min(1.0, used_bytes / limit_bytes)

            return sample
    process, total_bytes = psutil.Process(), psutil.virtual_memory().total
    return lambda: process.memory_info().rss / total_bytes


def _read_bytes(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
