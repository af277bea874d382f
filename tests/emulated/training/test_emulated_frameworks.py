"""DDP, FSDP2 and FSDP1 train on the backend as they would without sharding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from emulated_world import World
from torch import nn

from zerotune.agent.nccl.emulated import journal
from zerotune.store.records import Collective


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 4))


def _train(model: nn.Module, batch: torch.Tensor, n_steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(n_steps):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _reference() -> list[float]:
    return _train(_model(), _batch(4))


def _batch(n_ranks: int) -> torch.Tensor:
    return torch.randn(8 * n_ranks, 16, generator=torch.Generator().manual_seed(2))


def _mean(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.tolist()


def _check(rank: int, kind: str) -> Any:
    reference = _reference()
    mine = _batch(4).chunk(4)[rank]
    model = _model()
    before = journal().counts.copy()
    if kind == "ddp":
        trained: Any = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    elif kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        trained = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy()
        if kind == "fsdp2-bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        trained = model
        for block in model:
            fully_shard(block, mp_policy=policy, reshard_after_forward=kind != "fsdp2-keep")
        fully_shard(model, mp_policy=policy)
    losses = _mean(_train(trained, mine))
    torch.testing.assert_close(losses, reference, rtol=2e-2 if kind == "fsdp2-bf16" else 1e-5, atol=1e-6)
    seen = {collective for collective, _, _ in journal().counts - before}
    expected = {Collective.all_reduce} if kind == "ddp" else {Collective.all_gather, Collective.reduce_scatter}
    assert expected <= seen
    return losses


FSDP2 = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="this torch's FSDP2 needs a GPU")


@pytest.mark.parametrize(
    "kind", ["ddp", *(pytest.param(kind, marks=FSDP2) for kind in ("fsdp2", "fsdp2-keep", "fsdp2-bf16")), "fsdp1"]
)
def test_trains_as_one_process_does(world: World, kind: str) -> None:
    losses = world.run(_check, kind)
    assert all(rank_losses == losses[0] for rank_losses in losses)
