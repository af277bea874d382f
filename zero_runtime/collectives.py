"""The only module that calls torch.distributed during a step: three small callables, chosen by backend.

On some backends, messages are better than a collective. Gloo's reduce-scatter is an all-reduce inside, which moves
2(n−1) shards per rank. Parts sent directly to their owners move n−1 and are summed there in the order of ranks, so
the result does not depend on a ring's order. Gloo's all-gather fills a second buffer as large as the result and
copies it; shards sent directly to their places need no buffer, and take less time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Returns when the result may be used on the current stream."""


AVOID_RECORD_STREAMS: Final = "TORCH_NCCL_AVOID_RECORD_STREAMS"
"""Unless this is set, torch before 2.8 frees memory that NCCL used only when the host sees that NCCL is done."""


def warn_of_held_memory(backend: str, torch_version: str, environment: Mapping[str, str] = os.environ) -> None:
    """Warns if freed layers may stay in memory: then stage 3 may need as much memory as the whole model."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    if backend == "nccl" and (major, minor) < (2, 8) and environment.get(AVOID_RECORD_STREAMS) != "1":
        warnings.warn(
            f"torch {torch_version} holds layers that stage 3 has freed until the host sees that NCCL is done;"
            f" set {AVOID_RECORD_STREAMS}=1 before the process group is made, or install torch 2.8 or newer",
            stacklevel=3,
        )


Gather = Callable[[Tensor, Tensor, dist.ProcessGroup], Work]
Reduce = Callable[[Tensor, dist.ProcessGroup], Work]


@dataclass(frozen=True)
class Collectives:
    """Callables that gather, scatter and reduce; every call returns at once.

    all_gather(whole, shard, group): whole has n_ranks × shard's elements.
    reduce_scatter(shard, whole, group): SUM, never AVG, so that NCCL keeps PAT and NVLS as candidates.
    all_reduce(whole, group): SUM in place.
    bucket_bytes: the most bytes that one call should move: more bytes gain no speed, and cost memory.
    coalesces: several calls together are one launch, as in NCCL's groups.
    """

    all_gather: Gather
    reduce_scatter: Gather
    all_reduce: Reduce
    bucket_bytes: int
    coalesces: bool = False

    def together(
        self, call: Callable[..., Work], arguments: Sequence[tuple[Tensor, ...]], group: dist.ProcessGroup
    ) -> Work:
        """Issues several calls of one kind as one; each has its arguments, without the group.

        Each element stays with its rank and is summed as in a separate call. One larger buffer would move elements
        to other ranks, where NCCL's rings begin their sums at another rank.
        """
        if len(arguments) == 1:
            return call(*arguments[0], group)
        if not self.coalesces or call not in _COALESCED:
            return _Several([call(*tensors, group) for tensors in arguments])
        with dist._coalescing_manager(group, async_ops=True) as several:
            for tensors in arguments:
                call(*tensors, group)
        work: Work = several
        return work


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _plain_all_gather(whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Work:
    work: Work = _all_gather(whole, shard, group=group, async_op=True)
    return work


def _plain_reduce_scatter(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Work:
    work: Work = _reduce_scatter(shard, whole, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work


def _plain_all_reduce(whole: Tensor, group: dist.ProcessGroup) -> Work:
    work: Work | None = dist.all_reduce(whole, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None
    return work


class _DirectSum:
    """A reduce-scatter by messages, with a sum in the order of ranks, which `wait` computes.

    With two ranks, the other's part is received in the place of the sum, as a + b equals b + a in all bits.
    """

    _TAG = 0x5A46  # so that a user's own messages in the same group are not taken for parts

    def __init__(self, shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
        n_ranks, rank = group.size(), group.rank()
        parts = list(torch.split(whole, shard.numel()))
        in_place = n_ranks == 2 and parts[rank].data_ptr() != shard.data_ptr()
        received = [shard] if in_place else list(torch.empty((n_ranks - 1, shard.numel()), dtype=shard.dtype))
        others = [(rank + distance) % n_ranks for distance in range(1, n_ranks)]
        self._works: list[Work] = []
        self._parts = {rank: parts[rank]}
        for other, room in zip(reversed(others), received, strict=True):
            self._parts[other] = room
            self._works.append(group.recv([room], other, self._TAG))
        self._works += [group.send([parts[other]], other, self._TAG) for other in others]
        self._shard = shard
        self._whole = whole  # gloo reads it until the work is done

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        first, second, *others = (self._parts[rank] for rank in range(len(self._parts)))
        overwrites = any(part.data_ptr() == self._shard.data_ptr() for part in others)  # stage 1 keeps sums in buckets
        total = torch.add(first, second, out=first if overwrites else self._shard)
        for part in others:
            total.add_(part)
        if overwrites:
            self._shard.copy_(total)


class _DirectGather:
    """An all-gather by messages, in which each shard is received in its place."""

    _TAG = 0x5A45  # so that a user's own messages in the same group are not taken for shards

    def __init__(self, whole: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        n_ranks, rank = group.size(), group.rank()
        parts = torch.split(whole, shard.numel())
        others = [(rank + distance) % n_ranks for distance in range(1, n_ranks)]
        self._works: list[Work] = [group.recv([parts[other]], other, self._TAG) for other in reversed(others)]
        self._works += [group.send([shard], other, self._TAG) for other in others]
        if parts[rank].data_ptr() != shard.data_ptr():
            parts[rank].copy_(shard)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Several:
    """The works of several collectives."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def maximum(value: Tensor, group: dist.ProcessGroup) -> Work:
    """The maximum over ranks, element by element, in place."""
    work: Work | None = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None
    return work


class _Done:
    """Work that is complete at once, as there is no other rank."""

    def wait(self) -> None:
        pass


def _exchange(shard: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Work:
    if shard.numel() < whole.numel():
        return _DirectSum(shard, whole, group)
    if shard.data_ptr() != whole.data_ptr():
        shard.copy_(whole)
    return _Done()


_COALESCED = (_plain_all_gather, _plain_reduce_scatter, _plain_all_reduce)


PLAIN = Collectives(_plain_all_gather, _plain_reduce_scatter, _plain_all_reduce, bucket_bytes=32 * 2**20)
EXCHANGED = Collectives(_DirectGather, _exchange, _plain_all_reduce, bucket_bytes=8 * 2**20)


def for_group(group: dist.ProcessGroup) -> Collectives:
    """The collectives that suit `group`'s backend."""
    backend = dist.get_backend(group)
    return EXCHANGED if backend == "gloo" else replace(PLAIN, coalesces="nccl" in backend)
