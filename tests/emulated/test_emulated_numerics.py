"""Every collective against a reference computed locally, for groups of 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_world import World, subgroup

from zerotune.agent.nccl.emulated import EmulatedNcclError
from zerotune.agent.nccl.emulated.transport.rendezvous import N_SLOTS

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPERATORS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8)


def _input(rank: int, n_elements: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small integers, so that every sum is exact in every dtype."""
    return ((torch.arange(n_elements) * 7 + rank * 3 + salt) % 5 + 1).to(dtype)


def _reduced(n: int, n_elements: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    stack = torch.stack([_input(rank, n_elements, torch.float64) for rank in range(n)])
    result = {
        dist.ReduceOp.SUM: lambda: stack.sum(0),
        dist.ReduceOp.AVG: lambda: stack.sum(0) / n,
        dist.ReduceOp.MAX: lambda: stack.amax(0),
        dist.ReduceOp.MIN: lambda: stack.amin(0),
        dist.ReduceOp.PRODUCT: lambda: stack.prod(0),
    }[op]()
    return result.to(dtype) if dtype.is_floating_point else result.trunc().to(dtype)


def _check_reductions(rank: int) -> None:
    for n in (1, 2, 3, 4):
        group = subgroup(n)
        if group is None:
            continue
        for dtype in DTYPES:
            for op in OPERATORS if n == 4 or dtype == torch.float32 else OPERATORS[:1]:
                expected = _reduced(n, n * 5, dtype, op)
                tensor = _input(rank, n * 5, dtype)
                dist.all_reduce(tensor, op=op, group=group)
                assert torch.equal(tensor, expected), (n, dtype, op)

                part = torch.empty(5, dtype=dtype)
                dist.reduce_scatter_tensor(part, _input(rank, n * 5, dtype), op=op, group=group)
                assert torch.equal(part, expected[rank * 5 : rank * 5 + 5]), (n, dtype, op)

                tensor = _input(rank, n * 5, dtype)
                dist.reduce(tensor, dst=n - 1, op=op, group=group)
                assert torch.equal(tensor, expected if rank == n - 1 else _input(rank, n * 5, dtype))
            part = torch.empty(3, dtype=dtype)
            dist.reduce_scatter(part, [_input(rank, n * 3, dtype)[3 * i : 3 * i + 3] for i in range(n)], group=group)
            assert torch.equal(part, _reduced(n, n * 3, dtype, dist.ReduceOp.SUM)[3 * rank : 3 * rank + 3])
        bits = torch.tensor([1 << rank, 255], dtype=torch.uint8)
        with pytest.raises(EmulatedNcclError):  # as ProcessGroupNCCL
            dist.all_reduce(bits, op=dist.ReduceOp.BXOR, group=group)
        # Uneven lists go as reductions to each rank.
        part = torch.empty(rank + 1)
        dist.reduce_scatter(part, [torch.full((i + 1,), float(rank + 1)) for i in range(n)], group=group)
        assert part.tolist() == [n * (n + 1) / 2] * (rank + 1)
        # A view with strides is reduced in place.
        wide = torch.zeros(4, 6)
        wide[:, ::2] = rank + 1
        dist.all_reduce(wide[:, ::2], group=group)
        assert wide[:, ::2].eq(n * (n + 1) / 2).all()
        assert wide[:, 1::2].eq(0).all()
        dist.destroy_process_group(group)  # NCCL's threads of each poll


def _check_copies(rank: int) -> None:
    for n in (1, 2, 3, 4):
        group = subgroup(n)
        if group is None:
            continue
        for dtype in (*DTYPES, torch.bool):
            for n_elements in (1, 7, 4096) if n == 4 else (7,):
                mine = _input(rank, n_elements, dtype)
                everyone = [_input(r, n_elements, dtype) for r in range(n)]
                flat = torch.empty(n * n_elements, dtype=dtype)
                dist.all_gather_into_tensor(flat, mine, group=group)
                assert torch.equal(flat, torch.cat(everyone))
                parts = [torch.empty(n_elements, dtype=dtype) for _ in range(n)]
                dist.all_gather(parts, mine, group=group)
                assert all(map(torch.equal, parts, everyone))

                tensor = mine.clone()
                dist.broadcast(tensor, src=n - 1, group=group)
                assert torch.equal(tensor, everyone[n - 1])

                parts = [torch.empty_like(mine) for _ in range(n)] if rank == n - 1 else None
                dist.gather(mine, parts, dst=n - 1, group=group)
                assert parts is None or all(map(torch.equal, parts, everyone))

                tensor = torch.empty_like(mine)
                dist.scatter(tensor, everyone if rank == 0 else None, src=0, group=group)
                assert torch.equal(tensor, everyone[rank])
            sent = torch.cat([_input(rank, 3, dtype, salt=r) for r in range(n)])
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=group)
            assert torch.equal(received, torch.cat([_input(r, 3, dtype, salt=rank) for r in range(n)]))
        # Uneven splits: rank r sends r + i + 1 rows to rank i.
        sent = [torch.full((rank + i + 1, 2), float(10 * rank + i)) for i in range(n)]
        received = [torch.empty(r + rank + 1, 2) for r in range(n)]
        dist.all_to_all_single(
            flat := torch.empty(sum(len(part) for part in received), 2), torch.cat(sent),
            [len(part) for part in received], [len(part) for part in sent], group=group,
        )  # fmt: skip
        expected = [torch.full((r + rank + 1, 2), float(10 * r + rank)) for r in range(n)]
        assert torch.equal(flat, torch.cat(expected))
        dist.all_to_all(received, sent, group=group)
        assert all(map(torch.equal, received, expected))
        # Uneven gathers go as broadcasts.
        parts = [torch.empty(r + 2) for r in range(n)]
        dist.all_gather(parts, torch.full((rank + 2,), float(rank)), group=group)
        assert all(part.eq(r).all() for r, part in enumerate(parts))
        objects: list[Any] = [None] * n
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
        assert [item["rank"] for item in objects] == list(range(n))
        shared = [{"from": rank}]
        dist.broadcast_object_list(shared, src=0, group=group)
        assert shared == [{"from": 0}]
        empty = torch.empty(0)
        dist.all_reduce(empty, group=group)
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def _check_coalesced(rank: int) -> None:
    c10d = dist.distributed_c10d
    device = torch.device("cpu")
    for given in (None, device):
        tensors = [torch.full((k,), float(rank)) for k in (3, 1, 500)]
        with c10d._coalescing_manager(device=given):
            for tensor in tensors:
                dist.all_reduce(tensor)
        assert all(tensor.eq(6).all() for tensor in tensors)
        outputs = [torch.empty(4 * k) for k in (2, 9)]
        with c10d._coalescing_manager(device=given, async_ops=True) as manager:
            for output in outputs:
                dist.all_gather_into_tensor(output, torch.full((len(output) // 4,), float(rank)))
        manager.wait()
        for output in outputs:
            assert torch.equal(output, torch.arange(4.0).repeat_interleave(len(output) // 4))
        lists = [[torch.empty(k) for k in (2, 9)] for _ in range(4)]  # by rank, then by tensor
        dist.all_gather_coalesced(lists, [torch.full((k,), float(rank)) for k in (2, 9)])
        assert all(output.eq(sender).all() for sender, outputs in enumerate(lists) for output in outputs)
        outputs = [torch.empty(k) for k in (2, 9)]
        with c10d._coalescing_manager(device=given):
            for output in outputs:
                dist.reduce_scatter_tensor(output, torch.arange(4.0).repeat_interleave(len(output)))
        assert all(output.eq(4 * rank).all() for output in outputs)


def _check_point_to_point(rank: int) -> None:
    right, left = (rank + 1) % 4, (rank - 1) % 4
    received = torch.empty(3)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((3,), float(rank)), right), dist.P2POp(dist.irecv, received, left)]
    )
    for work in works:
        work.wait()
    assert received.eq(left).all()
    if rank == 0:
        dist.send(torch.ones(2), 1, tag=7)
    elif rank == 1:
        received = torch.zeros(2)
        assert dist.recv(received, tag=7) == 0
        assert received.eq(1).all()


def _check_functional(rank: int) -> None:
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    world = dist.group.WORLD
    assert funcol.all_reduce(torch.full((3,), float(rank)), "sum", world).eq(6).all()
    assert funcol.all_reduce(torch.full((3,), float(rank)), "avg", world).eq(1.5).all()
    assert funcol.all_gather_tensor(torch.full((2,), float(rank)), 0, world).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert funcol.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, world).item() == 4 * rank
    assert funcol.broadcast(torch.full((2,), float(rank)), 2, world).eq(2).all()
    assert funcol.all_to_all_single(torch.full((4,), float(rank)), None, None, world).tolist() == [0, 1, 2, 3]
    full = torch.arange(32.0).view(8, 4)
    sharded = distribute_tensor(full, mesh, (Shard(0), Shard(1)))
    assert torch.equal(sharded.full_tensor(), full)
    assert torch.equal((sharded @ sharded.T).full_tensor(), full @ full.T)


def _check_async(rank: int) -> None:
    n_calls = N_SLOTS + 100  # more in flight than slots
    tensors = [torch.full((100,), float(rank + i)) for i in range(n_calls)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i in reversed(range(n_calls)):
        works[i].wait()
        assert tensors[i][0] == 6 + 4 * i
    assert all(work.is_completed() for work in works)
    future = dist.all_reduce(torch.full((2,), float(rank)), async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().eq(12).all()
    large = torch.full((3_000_000,), float(rank))
    dist.all_reduce(large)
    assert large.eq(6).all()


def _check_all(rank: int) -> None:
    # in one program: what takes long is to start it
    for check in (_check_reductions, _check_copies, _check_coalesced, _check_point_to_point, _check_functional):
        check(rank)
    _check_async(rank)


def test_results_are_those_of_a_local_computation(world: World) -> None:
    world.run(_check_all)
