"""Marks the plugin's records of kernels on the mock, which must never count as measurements on a GPU."""

from __future__ import annotations

import ctypes
from typing import Final

from zerotune.store.records import TimingSource

_SET_TIMING_SOURCE: Final = "zerotune_set_timing_source_override"


def mark_records_emulated(plugin: str) -> None:
    """Have the profiler plugin at this path mark its records, if it is zerotune's."""
    if not plugin.endswith(".so"):
        return
    try:
        library = ctypes.CDLL(plugin)
    except OSError:
        return  # NCCL reports it, and runs without it
    if hasattr(library, _SET_TIMING_SOURCE):
        getattr(library, _SET_TIMING_SOURCE)(ctypes.c_uint32(TimingSource.emulated))
