"""Tasks of each collective: the data that one rank sends, and how it takes its results from all ranks' data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ..errors import EmulatedNcclError
from ..host.calls import Finish, IssuedCall, Task
from . import capture
from .reduction import Operator, reduce_into

Tensors = Sequence[torch.Tensor]

BARRIER: Final = Task(None, 4, 1, None)
"""ProcessGroupNCCL's barrier is an all-reduce of one element."""


def all_reduce(tensor: torch.Tensor, op: Operator) -> Task:
    """Reduce `tensor` in place."""

    def finish(call: IssuedCall, piece: int) -> None:
        reduce_into(tensor, call.rendezvous, call.index, piece, op, call.candidate)

    return Task(_contiguous(tensor), _bytes(tensor), tensor.numel(), finish, tensor)


def broadcast(output: torch.Tensor, root: int, rank: int, source: torch.Tensor | None = None) -> Task:
    """Fill a tensor with the root's `source`; None: with the root's `output`."""
    is_root = rank == root
    sent = _contiguous(output if source is None else source) if is_root else None

    def finish(call: IssuedCall, piece: int) -> None:
        if not is_root or source is not None:
            _fill(call, root, piece, output)

    # As for all_gather, NCCL counts bytes here, whatever the datatype.
    return Task(sent, _bytes(output), _bytes(output), finish, output, root)


def reduce(source: torch.Tensor, op: Operator, root: int, rank: int, output: torch.Tensor | None = None) -> Task:
    """Reduce a tensor of every rank to the root's `output`, which has the size of `source`; None: to its `source`."""
    target = source if output is None else output

    def finish(call: IssuedCall, piece: int) -> None:
        if rank == root:
            reduce_into(target, call.rendezvous, call.index, piece, op, call.candidate)

    return Task(_contiguous(source), _bytes(source), source.numel(), finish, target, root)


def all_gather(output: torch.Tensor, source: torch.Tensor, n_ranks: int) -> Task:
    """Fill `output` with every rank's `source` in order; ValueError if it is not `n_ranks` times as large."""
    shard_bytes = _bytes(source)
    if _bytes(output) != shard_bytes * n_ranks:
        raise ValueError(f"output holds {_bytes(output)} bytes, not {n_ranks} times {shard_bytes}")

    def finish(call: IssuedCall, piece: int) -> None:
        if output.is_contiguous():
            call.rendezvous.gather(call.index, piece, output, shard_bytes)
        else:
            flat = torch.empty(output.shape, dtype=output.dtype)
            call.rendezvous.gather(call.index, piece, flat, shard_bytes)
            output.copy_(flat)

    return Task(_contiguous(source), shard_bytes * n_ranks, shard_bytes, finish, output)


def all_gather_list(outputs: Tensors, source: torch.Tensor) -> Task:
    """Fill `outputs`, one per rank, with every rank's `source`."""
    shard_bytes = _bytes(source)
    return Task(_contiguous(source), shard_bytes * len(outputs), shard_bytes, _fill_each(outputs), outputs[0])


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, op: Operator, rank: int, n_ranks: int) -> Task:
    """Fill `output` with this rank's part of the reduction; ValueError if `source` is not `n_ranks` times as large."""
    n_elements = output.numel()
    if source.numel() != n_elements * n_ranks:
        raise ValueError(f"input holds {source.numel()} elements, not {n_ranks} times {n_elements}")

    def finish(call: IssuedCall, piece: int) -> None:
        reduce_into(output, call.rendezvous, call.index, piece, op, call.candidate, rank * n_elements)

    return Task(_contiguous(source), _bytes(source), n_elements, finish, output)


def gather(outputs: Tensors, source: torch.Tensor, n_ranks: int) -> Task:
    """Collect every rank's `source` at the root in `outputs`, which is empty on other ranks."""
    return Task(_contiguous(source), _bytes(source) * n_ranks, source.numel(), _fill_each(outputs), source)


def scatter(output: torch.Tensor, sources: Tensors | None, root: int, rank: int, n_ranks: int) -> Task:
    """Give each rank its tensor of the root's list, which is None on other ranks; EmulatedNcclError under capture."""
    capture.forbid("scatter")
    sent = None if sources is None else torch.cat([part.detach().reshape(-1) for part in sources])

    def finish(call: IssuedCall, piece: int) -> None:
        _fill(call, root, piece, output, rank * _bytes(output))

    return Task(sent, _bytes(output) * n_ranks, output.numel(), finish, output)


def all_to_all(outputs: Tensors, sources: Tensors, rank: int) -> list[Task]:
    """Fill `outputs[i]` with rank i's `sources[rank]`; returns one task per destination."""

    def finish(call: IssuedCall, first_piece: int) -> None:
        for peer, output in enumerate(outputs):
            _fill(call, peer, first_piece + rank, output)

    todo = [Task(_contiguous(source), _bytes(source), source.numel(), None, source) for source in sources]
    todo[0].finish = finish
    return todo


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise EmulatedNcclError(f"the emulated NCCL moves dense CPU tensors, not {tensor.layout} on {tensor.device}")
    if not tensor.is_contiguous():
        capture.forbid("tensors that are not contiguous")  # a replay would send the copy made now
    return tensor.detach().contiguous()


def _fill_each(outputs: Tensors) -> Finish:
    def finish(call: IssuedCall, piece: int) -> None:
        for rank, output in enumerate(outputs):
            _fill(call, rank, piece, output)

    return finish


def _fill(call: IssuedCall, rank: int, piece: int, output: torch.Tensor, offset_bytes: int = 0) -> None:
    if output.is_contiguous():
        call.rendezvous.copy(call.index, rank, piece, output, offset_bytes)
        return
    flat = torch.empty(output.shape, dtype=output.dtype)
    call.rendezvous.copy(call.index, rank, piece, flat, offset_bytes)
    output.copy_(flat)
