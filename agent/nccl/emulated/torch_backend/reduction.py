"""Reductions over all ranks' payloads, in the same order on every rank, so that all compute the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from .....store.records import Candidate
from ..errors import EmulatedNcclError
from ..transport.rendezvous import Rendezvous

_Accumulate = Callable[[torch.Tensor, torch.Tensor], object]

_OPERATORS: Final[dict[int, _Accumulate]] = {
    0: torch.Tensor.add_,
    1: torch.Tensor.add_,
    2: torch.Tensor.mul_,
    3: lambda total, other: torch.minimum(total, other, out=total),
    4: lambda total, other: torch.maximum(total, other, out=total),
    8: torch.Tensor.add_,
}
AVERAGE: Final = 1
PREMULTIPLIED_SUM: Final = 8


class Operator(NamedTuple):
    """A reduction: torch's `ReduceOp` code, and the factor of a premultiplied sum."""

    code: int
    factor: float | torch.Tensor | None = None

    @property
    def is_scaled(self) -> bool:
        """Averages and premultiplied sums, for which NCCL excludes some algorithms."""
        return self.code in (AVERAGE, PREMULTIPLIED_SUM)


class Order:
    """The order in which ranks' payloads are added."""

    def __init__(self) -> None:
        self.depends_on_setting = False
        """True: the setting decides the first rank, as another ring or tree in NCCL would; False: rank 0 is first."""

    def of(self, setting: Candidate, n_ranks: int) -> Sequence[int]:
        """The ranks in this order, equal on all ranks."""
        if not self.depends_on_setting or setting.algorithm is None or setting.protocol is None:
            return range(n_ranks)
        first = (int(setting.algorithm) + int(setting.protocol) + setting.n_channels) % n_ranks
        return [*range(first, n_ranks), *range(first)]


order: Final = Order()
"""The order of this process."""
SUM: Final = Operator(0)
_PLAIN: Final = {code: Operator(code) for code in _OPERATORS}


def operator(redop: dist.ReduceOp) -> Operator:
    """The reduction that torch asks for; EmulatedNcclError if NCCL does not have it (bitwise operations)."""
    state: Any = redop.__getstate__()  # the only way to a premultiplied sum's factor
    code = int(state[0])
    if code not in _OPERATORS:
        raise EmulatedNcclError(f"NCCL has no reduction {redop}")
    return Operator(code, state[1]) if code == PREMULTIPLIED_SUM else _PLAIN[code]


def reduce_into(
    out: torch.Tensor,
    rendezvous: Rendezvous,
    index: int,
    piece: int,
    op: Operator,
    setting: Candidate,
    first_element: int = 0,
) -> None:
    """Reduce a piece of all ranks' payloads; EmulatedNcclError if a rank sent too few elements.

    Args:
        piece: number of the piece, the same on all ranks.
        first_element: in each rank's piece; `out.numel()` elements from there on are reduced.
    """
    accumulate, ranks = _OPERATORS[op.code], order.of(setting, rendezvous.n_ranks)
    n_elements = out.numel()
    total = out.view(-1) if out.is_contiguous() else torch.empty(n_elements, dtype=out.dtype)
    for rank in ranks:
        view = rendezvous.view(index, rank, piece, out.dtype)
        if first_element or view.numel() != n_elements:
            view = view[first_element : first_element + n_elements]
        if view.numel() != n_elements:
            raise EmulatedNcclError(f"rank {rank} sent {view.numel()} elements, not {n_elements}")
        if rank == ranks[0]:
            total.copy_(view)
        else:
            accumulate(total, view)
    if op.code == AVERAGE:
        if total.is_floating_point() or total.is_complex():
            total.div_(rendezvous.n_ranks)
        else:
            total.div_(rendezvous.n_ranks, rounding_mode="trunc")
    elif op.factor is not None:
        total.mul_(op.factor)
    if not out.is_contiguous():
        out.copy_(total.view(out.shape))
