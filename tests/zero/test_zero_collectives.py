"""The collectives made for gloo give what torch's own would, beside a user's messages."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from zero_world import World, group_of

from zerotune.zero_runtime import collectives
from zerotune.zero_runtime.collectives import EXCHANGED, PLAIN

N_ELEMENTS = [1, 7, 4096]


@pytest.mark.parametrize(
    ("backend", "version", "environment", "holds"),
    [
        ("nccl", "2.7.1+cu126", {}, True),
        ("nccl", "2.6.0", {collectives.AVOID_RECORD_STREAMS: "0"}, True),
        ("nccl", "2.7.1", {collectives.AVOID_RECORD_STREAMS: "1"}, False),
        ("nccl", "2.8.0a0+git", {}, False),
        ("nccl", "2.13.0", {}, False),
        ("gloo", "2.7.1", {}, False),
    ],
)
def test_a_torch_that_holds_freed_layers_is_named_with_the_remedy(backend, version, environment, holds) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        collectives.warn_of_held_memory(backend, version, environment)
    assert [collectives.AVOID_RECORD_STREAMS in str(each.message) for each in said] == [True] * holds


def gathered(n_ranks: int, in_place: bool) -> list[bool]:
    group = group_of(n_ranks)
    rank = dist.get_rank(group)
    equal = []
    for n in N_ELEMENTS:
        shard = torch.randn(n, generator=torch.Generator().manual_seed(rank)).bfloat16()
        expected, whole = (torch.full((n * n_ranks,), float("nan"), dtype=shard.dtype) for _ in range(2))
        PLAIN.all_gather(expected, shard, group).wait()
        if in_place:
            own = whole[rank * n : (rank + 1) * n]
            own.copy_(shard)
            shard = own
        EXCHANGED.all_gather(whole, shard, group).wait()
        equal.append(torch.equal(whole, expected))
    return equal


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_direct_gather_equals_torchs(world: World, n_ranks: int, in_place: bool) -> None:
    for equal in world.run(n_ranks, gathered, n_ranks, in_place):
        assert equal == [True] * len(N_ELEMENTS)


def gathered_beside_messages() -> tuple[list[float], list[float]]:
    """Two gathers under way at once, with a user's message in the same group posted before and between them."""
    group = group_of(2)
    rank = dist.get_rank(group)
    said, heard = torch.full((3,), 100.0 + rank), torch.zeros(3)
    receive = dist.irecv(heard, group=group, group_src=1 - rank)
    wholes = [torch.zeros(6) for _ in range(2)]
    first = EXCHANGED.all_gather(wholes[0], torch.full((3,), 1.0 + rank), group)
    send = dist.isend(said, group=group, group_dst=1 - rank)
    second = EXCHANGED.all_gather(wholes[1], torch.full((3,), 11.0 + rank), group)
    for work in (second, first, receive, send):
        assert work is not None
        work.wait()
    return heard.tolist(), torch.cat(wholes).tolist()


def test_direct_gather_does_not_take_a_users_message_for_a_shard(world: World) -> None:
    for rank, (heard, wholes) in enumerate(world.run(2, gathered_beside_messages)):
        assert heard == [101.0 - rank] * 3
        assert wholes == [1.0] * 3 + [2.0] * 3 + [11.0] * 3 + [12.0] * 3


def summed(n_ranks: int, in_place: bool) -> list[bool]:
    """Whether the sum is, to the last bit, that in the order of ranks; two are under way at once."""
    group = group_of(n_ranks)
    rank = dist.get_rank(group)
    equal = []
    for n in N_ELEMENTS:
        wholes = [
            torch.randn(n * n_ranks, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(n_ranks)
        ]
        expected = sum((whole[rank * n : (rank + 1) * n] for whole in wholes[1:]), wholes[0][rank * n : (rank + 1) * n])
        works, shards = [], []
        for whole in (wholes[rank].clone(), -wholes[rank]):
            shards.append(whole[rank * n : (rank + 1) * n] if in_place else torch.full((n,), float("nan")).bfloat16())
            works.append(EXCHANGED.reduce_scatter(shards[-1], whole, group))
        for work in works:
            work.wait()
        equal.append(torch.equal(shards[0], expected) and torch.equal(shards[1], -expected))
    return equal


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("in_place", [False, True])
def test_direct_sum_adds_in_the_order_of_ranks(world: World, n_ranks: int, in_place: bool) -> None:
    for equal in world.run(n_ranks, summed, n_ranks, in_place):
        assert equal == [True] * len(N_ELEMENTS)


def test_gloo_has_the_direct_ones(world: World) -> None:
    assert world.run(2, backend_of_two) == [True, True]


def backend_of_two() -> bool:
    return collectives.for_group(group_of(2)) is EXCHANGED
