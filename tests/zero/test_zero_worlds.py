"""Any shapes, on any number of ranks, in any precision, with any bucket: equal to one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zero_models import DTYPES
from zero_world import World, group_of

import zero_runtime


class Scaled(nn.Module):
    """A loss in which parameter i of rank r gets the gradient (r + 1)·(its index), whatever its shape."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.ones(s))]) for s in shapes)
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, factor: Tensor) -> Tensor:
        total = self.bias.sum() * factor
        for index, part in enumerate(self.parts):
            total = total + (part[0] * float(index + 1)).sum() * factor
        return total


def one_step(n_ranks: int, shapes: list[tuple[int, ...]], chosen: dict[str, Any]) -> dict[str, Tensor]:
    group = group_of(n_ranks)
    model = Scaled(shapes)
    engine = zero_runtime.shard(model, group=group, layers=[], **chosen)
    optimizer = engine.optimizer(torch.optim.SGD, lr=1.0)
    model(torch.tensor(float(dist.get_rank(group) + 1))).backward()
    optimizer.step()
    values: dict[str, Tensor] = engine.state_dict()
    return values


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n_ranks=st.integers(1, 4),
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=5),
    stage=st.sampled_from([1, 2, 3]),
    precision=st.sampled_from([None, "bf16", "fp16"]),
    bucket_bytes=st.sampled_from([1, 200, 5000]),
)
def test_one_step(
    world: World,
    n_ranks: int,
    shapes: list[tuple[int, ...]],
    stage: int,
    precision: str | None,
    bucket_bytes: int,
) -> None:
    chosen = {"stage": stage, "precision": precision, "bucket_bytes": bucket_bytes}
    dtype = DTYPES[precision] or torch.float32
    gradients = [(torch.arange(1, n_ranks + 1) * (i + 1)).sum().item() / n_ranks for i in range(len(shapes))]
    for values in world.run(n_ranks, one_step, n_ranks, shapes, chosen):
        for i, gradient in enumerate(gradients):
            # small integers are exact; a division by three is rounded once per rank and in the product
            bound = 0.0 if n_ranks != 3 else (n_ranks + 1) * torch.finfo(dtype).eps * gradient
            value = values[f"parts.{i}.0"]
            assert tuple(value.shape) == tuple(shapes[i])
            assert bool(((value - (1.0 - gradient)).abs() <= bound).all())
