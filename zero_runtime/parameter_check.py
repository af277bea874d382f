"""`Settings.debug`: finds parameters that were changed outside the runtime, before each forward that trains.

The ranks take one maximum over their findings and wait for it, so all raise the same error, and none hangs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from . import collectives, phases
from .errors import LifecycleError
from .layout.flat_buffer import Flat
from .stages.backward import BackwardPass
from .stages.partitioned import between_graphs

_KINDS = ("was replaced by another tensor", "was given new storage", "was written in place")


class ParameterCheck:
    """Checks every parameter before each forward that trains; all ranks call it equally often.

    Args:
        flats: in the same order on every rank.
        groups: groups that together reach all ranks that train this model.
        backward: a forward inside a backward pass is a recomputation, which is not checked.
    """

    def __init__(
        self, model: nn.Module, flats: Sequence[Flat], groups: Sequence[dist.ProcessGroup], backward: BackwardPass
    ) -> None:
        self._flats, self._groups, self._backward = tuple(flats), tuple(groups), backward
        self._names = [managed.name for flat in flats for managed in flat.managed]
        self.accept_writes()
        model.register_forward_pre_hook(between_graphs(self._before_forward), prepend=True)

    def accept_writes(self) -> None:
        """Accepts the present values as the runtime's own; later writes in place are reported."""
        self._versions = [parameter._version for flat in self._flats for parameter in flat.parameters]

    def _before_forward(self, *_: object) -> None:
        if not torch.is_grad_enabled() or self._backward.is_under_way():
            return
        n_kinds, n_names = len(_KINDS), len(self._names)
        index, kind = next(self._changes(), (0, -1))
        mine = 0 if kind < 0 else 1 + (dist.get_rank() * n_kinds + kind) * n_names + index
        number = torch.tensor([mine], device=self._flats[0].device)
        for group in self._groups:
            phases.announce(phases.OTHER)
            collectives.maximum(number, group).wait()
        if found := int(number.item()):
            place, index = divmod(found - 1, n_names)
            rank, kind = divmod(place, n_kinds)
            raise LifecycleError(
                f"parameter {self._names[index]} {_KINDS[kind]} outside the runtime on rank {rank}; change "
                "parameters through engine.full_parameters() or engine.load_state_dict()"
            )

    def _changes(self) -> Iterator[tuple[int, int]]:
        """(index of the parameter, index of its kind of change) on this rank."""
        index = 0
        for flat in self._flats:
            for managed, value in zip(flat.managed, flat.shown, strict=True):
                parameter = managed.parameter
                with torch._C.DisableTorchFunctionSubclass():
                    address, version = parameter.data_ptr(), parameter._version
                if any(module._parameters.get(name) is not parameter for module, name in managed.holders):
                    yield index, 0
                elif address != value.data_ptr():
                    yield index, 1
                elif version != self._versions[index]:
                    yield index, 2
                index += 1
