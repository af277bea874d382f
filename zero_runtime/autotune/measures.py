"""A rank's measurements: the time, and its free device memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

UNLIMITED_BYTES: Final = 1 << 50
"""Free memory of a CPU, whose processes share it: no rank counts it."""
USABLE: Final = 0.8
"""Share of free memory that may be used: the rest is for fragments."""


def clock_of(group: dist.ProcessGroup, device: torch.device) -> Callable[[], float]:
    """A clock (us) that waits until the device has done all work; an emulated group may have its own, `now_us()`."""
    own: Callable[[], float] | None = getattr(group, "now_us", None)
    if own is not None:
        return own

    def now_us() -> float:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return 1e6 * time.perf_counter()

    return now_us


def free_bytes_of(device: torch.device) -> Callable[[], int]:
    """Measures device memory that was free at the fullest moment so far, without what fragments may take."""

    def free_bytes() -> int:
        if device.type != "cuda":
            return UNLIMITED_BYTES
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return int(USABLE * max(0, free + cached))

    return free_bytes


def left_bytes_of(group: dist.ProcessGroup, device: torch.device) -> Callable[[], int]:
    """Measures device memory that NCCL could allocate now; memory that torch has reserved is not free.

    An emulated group answers with its `left_bytes()`.
    """
    own: Callable[[], int] | None = getattr(group, "left_bytes", None)
    if own is not None:
        return own

    def left_bytes() -> int:
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else UNLIMITED_BYTES

    return left_bytes
