"""Our plugin's records of kernels on the mock must never pass for measurements on a GPU."""

from __future__ import annotations

import ctypes
from typing import Final

from ....store.records import TimingSource

_SET_TIMING_SOURCE: Final = "zerotune_set_timing_source_override"


def records_say_emulated(plugin: str) -> None:
    """Tell the profiler plugin of this path, if it is ours."""
    if not plugin.endswith(".so"):
        return
    try:
        library = ctypes.CDLL(plugin)
    except OSError:
        return  # NCCL will say so, and run without it
    if hasattr(library, _SET_TIMING_SOURCE):
        getattr(library, _SET_TIMING_SOURCE)(ctypes.c_uint32(TimingSource.emulated))
