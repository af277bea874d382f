"""What a rank measures of itself: how late it is, and how much device memory is free."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

UNLIMITED_BYTES: Final = 1 << 50
"""Of a CPU: what its processes share is not one rank's to count."""
USABLE: Final = 0.8
"""Of what is free: the rest is for fragments."""


def clock_of(group: dist.ProcessGroup, device: torch.device) -> Callable[[], float]:
    """Microseconds at which all that was asked of the device is done.

    Args:
        group: one that keeps a time of its own, as an emulated one may, says it by `now_us()`.
    """
    own: Callable[[], float] | None = getattr(group, "now_us", None)
    if own is not None:
        return own

    def now_us() -> float:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        return 1e6 * time.perf_counter()

    return now_us


def free_bytes_of(device: torch.device) -> Callable[[], int]:
    """Device memory that was not taken at the fullest moment so far, less what fragments may take."""

    def free_bytes() -> int:
        if device.type != "cuda":
            return UNLIMITED_BYTES
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return int(USABLE * max(0, free + cached))

    return free_bytes


def left_bytes_of(group: dist.ProcessGroup, device: torch.device) -> Callable[[], int]:
    """Device memory that NCCL could have now, which the driver gives: what torch has reserved does not count.

    Args:
        group: an emulated one says it by `left_bytes()`.
    """
    own: Callable[[], int] | None = getattr(group, "left_bytes", None)
    if own is not None:
        return own

    def left_bytes() -> int:
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else UNLIMITED_BYTES

    return left_bytes
