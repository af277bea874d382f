"""Any parameters, on any number of ranks, in any precision, bucket and rhythm: equal to what one process computes."""

from __future__ import annotations

from contextlib import nullcontext
from math import prod, sqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zero_models import DTYPES
from zero_world import World, group_of

from zerotune import zero_runtime

N_STEPS = 2


class Part(NamedTuple):
    """One parameter; the part behind a tied one uses it too, and "first" ones are used by rank 0 only."""

    shape: tuple[int, ...]
    kind: str


class Plan(NamedTuple):
    """What is trained and how."""

    parts: tuple[Part, ...]
    n_ranks: int
    n_micro: int
    no_sync: bool
    max_norm: float | None
    by_layer: bool


class Holder(nn.Module):
    """Gives its parameter, and one that it borrows, the gradient weight·factor."""

    def __init__(self, own: nn.Parameter, borrowed: nn.Parameter | None, weight: float) -> None:
        super().__init__()
        self.own, self.borrowed, self.weight = own, borrowed, weight

    def forward(self, factor: Tensor, use_own: bool) -> Tensor:
        total = factor * 0
        for parameter in [self.own] * use_own + [self.borrowed] * (self.borrowed is not None):
            total = total + (parameter * self.weight).sum() * factor
        return total


class Linear(nn.Module):
    def __init__(self, parts: tuple[Part, ...]) -> None:
        super().__init__()
        self.kinds = [part.kind for part in parts]
        self.layers = nn.ModuleList()
        borrowed = None
        for index, (shape, kind) in enumerate(parts):
            own = nn.Parameter(torch.ones(shape), requires_grad=kind != "frozen")
            self.layers.append(Holder(own, borrowed, index + 1.0))
            borrowed = own if kind == "tied" else None
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, factor: Tensor, rank: int) -> Tensor:
        total = self.bias.sum() * factor
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            total = total + layer(factor, kind in ("plain", "tied", "frozen") or (kind == "first" and rank == 0))
        return total


def factor_of(rank: int, micro: int) -> float:
    return float(rank + 1 + micro)


def train(plan: Plan, chosen: dict[str, Any]) -> dict[str, Tensor]:
    group = group_of(plan.n_ranks)
    rank = dist.get_rank(group)
    model = Linear(plan.parts)
    engine = zero_runtime.shard(model, group=group, layers=None if plan.by_layer else [], **chosen)
    optimizer = engine.optimizer(torch.optim.SGD, lr=1.0)
    for _ in range(N_STEPS):
        for micro in range(plan.n_micro):
            local = plan.no_sync and micro < plan.n_micro - 1
            with engine.no_sync() if local else nullcontext():
                model(torch.tensor(factor_of(rank, micro)), rank).backward()
        if plan.max_norm is not None:
            engine.clip_grad_norm_(plan.max_norm)
        optimizer.step()
    values: dict[str, Tensor] = engine.state_dict()
    return values


def expected_gradients(plan: Plan) -> list[float]:
    """Of every part's elements, and of the bias's."""

    def mean(ranks: range) -> float:
        return sum(factor_of(r, m) for r in ranks for m in range(plan.n_micro)) / plan.n_ranks

    gradients = []
    for index, (_, kind) in enumerate(plan.parts):
        weight = index + 1 if kind in ("plain", "tied", "first") else 0
        weight += index + 2 if kind == "tied" and index + 1 < len(plan.parts) else 0
        gradients.append(weight * mean(range(1 if kind == "first" else plan.n_ranks)))
    return [*gradients, mean(range(plan.n_ranks))]


shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
kinds = st.sampled_from(["plain", "plain", "tied", "frozen", "unused", "first"])
plans = st.builds(
    Plan,
    parts=st.lists(st.builds(Part, shapes, kinds), min_size=1, max_size=5).map(tuple),
    n_ranks=st.integers(1, 4),
    n_micro=st.integers(1, 2),
    no_sync=st.booleans(),
    max_norm=st.sampled_from([None, 2.0]),
    by_layer=st.booleans(),
)


@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=plans,
    stage=st.sampled_from([1, 2, 3]),
    precision=st.sampled_from([None, "bf16", "fp16"]),
    bucket_bytes=st.sampled_from([1, 200, 5000]),
    find_unused=st.booleans(),
)
def test_any_plan(
    world: World, plan: Plan, stage: int, precision: str | None, bucket_bytes: int, find_unused: bool
) -> None:
    chosen = {
        "stage": stage,
        "precision": precision,
        "bucket_bytes": bucket_bytes,
        "find_unused_parameters": find_unused,
    }
    eps = torch.finfo(DTYPES[precision] or torch.float32).eps
    gradients = expected_gradients(plan)
    shapes = [*(part.shape for part in plan.parts), (3,)]
    scale = 1.0
    # Small integers over 1, 2 or 4 are exact; a division by three is rounded once per rank and in the product.
    roundings = 0.0 if plan.n_ranks != 3 else (plan.n_ranks + 1) * plan.n_micro * eps
    if plan.max_norm is not None:
        norm = sqrt(sum(prod(shape) * g * g for shape, g in zip(shapes, gradients, strict=True)))
        scale = min(1.0, plan.max_norm / (norm + 1e-6))
        # as many additions as elements, a root, a division and a product, in fp32, and what the norm inherits
        roundings = 2 * roundings + (sum(prod(s) for s in shapes) + 4) * 2.0**-24
    for values in world.run(plan.n_ranks, train, plan, chosen):
        names = [*(f"layers.{i}.own" for i in range(len(plan.parts))), "bias"]
        for name, shape, gradient in zip(names, shapes, gradients, strict=True):
            assert tuple(values[name].shape) == tuple(shape)
            step = N_STEPS * gradient * scale
            bound = roundings * step + (N_STEPS * 2.0**-24 * (1 + step) if roundings else 0.0)
            assert bool(((values[name] - (1.0 - step)).abs() <= bound).all()), (name, values[name], 1.0 - step)
