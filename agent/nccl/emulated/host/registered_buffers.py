"""Buffers registered with a communicator, whose collectives NCCL may run without asking the tuner."""

from __future__ import annotations

import os
from typing import Final

import torch

from .....store.records import Collective, CommunicatorClass
from ...release import Release
from ..errors import EmulatedNcclError
from ..torch_backend.reduction import Operator
from .calls import Path, Task

_SYMMETRIC: Final = frozenset({Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce})
_SUM: Final = 0
_NO_KERNELS: Final = frozenset({"2", "zero"})
"""Values of NCCL_CTA_POLICY under which all_gather takes no multiprocessors."""


class RegisteredBuffers:
    """One communicator's registered buffers. All ranks must call `register`, as ncclCommWindowRegister."""

    def __init__(self, release: Release, communicator: CommunicatorClass) -> None:
        self._release = release
        self._reachable = communicator.n_nodes == 1  # symmetric kernels load and store: one NVLink domain
        self._tensors: dict[int, torch.Tensor] = {}
        """By address; kept alive here, so that no other tensor gets the memory of a window."""

    def register(self, tensor: torch.Tensor) -> None:
        """From now on collectives between registered buffers run symmetric kernels.

        Raises `EmulatedNcclError` if this release has no windows.
        """
        if not self._release.has_symmetric_kernels:
            raise EmulatedNcclError("windows need ZEROTUNE_NCCL_VERSION 2.27 or newer")
        self._tensors[tensor.data_ptr()] = tensor

    def deregister(self, tensor: torch.Tensor) -> None:
        """Undo `register`."""
        self._tensors.pop(tensor.data_ptr(), None)

    def path(self, collective: Collective, op: Operator, tasks: list[Task]) -> Path:
        """How NCCL runs fused tasks: by a usual kernel, unless all buffers are registered and `op` is a plain sum."""
        if not self._tensors or not self._reachable or collective not in _SYMMETRIC or op.code != _SUM:
            return Path.kernel
        if not all(self._holds(task.piece) and self._holds(task.output) for task in tasks):
            return Path.kernel
        saves_kernels = os.environ.get("NCCL_CTA_POLICY", "").strip().lower() in _NO_KERNELS
        if saves_kernels and collective is Collective.all_gather and self._release.has_copy_engines:
            return Path.copy_engine
        return Path.symmetric

    def _holds(self, tensor: torch.Tensor | None) -> bool:
        if tensor is None:
            return False
        first, last = _range(tensor)
        return any(start <= first and last <= end for start, end in map(_range, self._tensors.values()))


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    return first, first + tensor.numel() * tensor.element_size()
