"""FSDP2 by the models and the check of torch's own tests: the wheel ships these helpers, and none of the tests."""

from __future__ import annotations

import copy
import unittest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_world import World

pytestmark = pytest.mark.slow
WIDTH = 6
"""Not a multiple of the ranks: shards are uneven."""


def _parity(rank: int, name: str, keeps: bool) -> int:
    """Train a replica and a sharded copy, on other data on each rank; torch compares parameters and gradients."""
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.common_fsdp import MLP, DoubleLinear, MLPStack, check_sharded_parity

    torch.manual_seed(3)
    replica = MLPStack(WIDTH) if name == "stack" else DoubleLinear(WIDTH, use_second_linear=False)
    sharded = copy.deepcopy(replica)
    for module in sharded.modules():
        if isinstance(module, MLP):
            fully_shard(module, reshard_after_forward=not keeps)
    fully_shard(sharded, reshard_after_forward=not keeps)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in (replica, sharded)]
    draw = torch.Generator().manual_seed(rank)
    n_steps = 4
    for _ in range(n_steps):
        batch = torch.randn(5, WIDTH, generator=draw)
        for model in (replica, sharded):
            model(batch).square().sum().backward()
        for parameter in replica.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        check_sharded_parity(Check(), replica, sharded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_sharded_parity(Check(), replica, sharded)
    return n_steps


class Check(unittest.TestCase):
    """The test case that `check_sharded_parity` asks for, which compares tensors as torch's own does."""

    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:
        if isinstance(first, torch.Tensor):
            torch.testing.assert_close(first, second)
        else:
            assert first == second, msg


@pytest.mark.parametrize(("name", "keeps"), [("stack", False), ("stack", True), ("unused", False)])
def test_fsdp2_trains_as_replicas_do(world: World, name: str, keeps: bool) -> None:
    pytest.importorskip("expecttest")
    assert world.run(_parity, name, keeps) == [4] * 4
