"""The layouts of structs that NCCL's kernels and its host share, by release.

They come from src/include/device.h of each release's tag (ncclDevComm, later ncclKernelComm; ncclDevChannel;
ncclDevWorkColl; ncclConnFifo). For 2.31 and later, whose sources were not available, they come from memory that the
library wrote and from its debugging information (`gdb -batch -ex "ptype /o struct ncclConnFifo" libnccl.so.2`). There
the host counts only works whose kernel-channel events a profiler asked for (`disassemble ncclProfilerPostPlanWork`).
Its kernels count all works (`cuobjdump -sass`, 2.32.3), so on GPUs a call without events shifts the times of later
calls. The mock counts as the host does, so that emulated times are right.
"""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple

from ....store.errors import UserError


class Layout(NamedTuple):
    """Offsets in bytes; -1: the release does not have it. Fields are those of `mock_layout` in mock_cuda.h."""

    n_ranks: int
    channels: int
    work_started: int
    work_completed: int
    channel_bytes: int
    work_counter: int
    times: int
    work_counts: int
    work_bytes: int
    batches: int
    function_mask: int
    fifo_slot_bytes: int
    fifo_size: int
    counts_watched_only: int


class LayoutFields(ctypes.Structure):
    """`mock_layout`."""

    _fields_ = [(name, ctypes.c_int32) for name in Layout._fields]


_LAYOUTS: Final[tuple[tuple[tuple[int, int, int], Layout], ...]] = (
    ((2, 21, 0), Layout(4, 56, -1, -1, 368, -1, 0, -1, 0, 0, 0, 24, 8, 0)),
    ((2, 22, 0), Layout(4, 56, -1, -1, 368, -1, 0, 24, 64, 1, 0x7FFF, 24, 8, 0)),
    ((2, 23, 0), Layout(4, 64, -1, -1, 368, -1, 0, 56, 96, 1, 0x7FFF, 24, 8, 0)),
    ((2, 25, 0), Layout(4, 64, -1, -1, 352, -1, 0, 56, 96, 1, 0x7FFF, 24, 8, 0)),
    ((2, 26, 0), Layout(4, 64, 80, 88, 368, 352, 0, 56, 96, 1, 0x7FFF, 24, 8, 0)),
    ((2, 27, 0), Layout(4, 56, 72, 80, 368, 352, 1, 56, 96, 1, 0x7FFF, 24, 8, 0)),
    ((2, 29, 0), Layout(4, 56, 72, 80, 368, 360, 1, 56, 96, 1, 0x7FFF, 24, 8, 0)),
    ((2, 30, 0), Layout(4, 56, 72, 80, 368, 360, 1, 80, 128, 1, 0x7FFF, 24, 8, 0)),
    ((2, 31, 0), Layout(4, 56, 72, 80, 368, 360, 1, 80, 128, 1, 0x7FF, 32, 16, 1)),
    ((2, 32, 0), Layout(4, 56, 72, 80, 368, 360, 1, 56, 96, 1, 0x7FF, 32, 16, 1)),
)
"""By the first release with the layout."""
NEWEST_KNOWN: Final = (2, 32)
"""Major and minor number of the newest release whose layout was verified."""


def layout_of(version: tuple[int, ...]) -> Layout:
    """The layout of a release; UserError if the release is older or newer than all known layouts."""
    if not (2, 21) <= version[:2] <= NEWEST_KNOWN:
        raise UserError(
            f"the mock CUDA does not know NCCL {'.'.join(map(str, version))}",
            f"take a release from 2.21 to {'.'.join(map(str, NEWEST_KNOWN))}",
        )
    return [layout for since, layout in _LAYOUTS if version >= since][-1]
