"""Trains a model of `zero_models` on a world and compares it with training in one process, to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from zero_models import DTYPES, MODELS, Batch, loss_of, reference
from zero_world import World, group_of

from zerotune import zero_runtime

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
EPS = 1e-2
"""AdamW's, where gradients are clipped: its update of an element is then no steeper than lr / EPS = 1 in the gradient,
however small that is."""
EVALUATED_BY_ANOTHER_KERNEL = ("t5", "t5-recomputed")
"""Plain torch's loss, too, is another without gradients: attention has a faster kernel for a bias that needs none."""


def adamw(max_norm: float | None) -> dict[str, float]:
    return ADAMW if max_norm is None else {**ADAMW, "eps": EPS}


def train(
    name: str,
    n_ranks: int,
    n_steps: int,
    n_micro: int,
    max_norm: float | None,
    no_sync: bool,
    settings: dict[str, Any],
) -> dict[str, Tensor]:
    make, batch = MODELS[name]
    model = make()
    group = group_of(n_ranks)
    engine = zero_runtime.shard(model, group=group, **settings)
    run = partial(evaluated_first, name) if n_micro == 1 else loss_of
    optimizer = engine.optimizer(torch.optim.AdamW, **adamw(max_norm))
    compute = DTYPES[settings.get("precision")]
    for n in range(n_steps):
        for micro in range(n_micro):
            values = batch(dist.get_rank(group), n * n_micro + micro)
            with engine.no_sync() if no_sync and micro < n_micro - 1 else nullcontext():
                run(model, values, compute).backward()
        if max_norm is not None:
            engine.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return engine.state_dict()


def evaluated_first(name: str, model: nn.Module, values: Batch, compute: torch.dtype | None) -> Tensor:
    """The loss; an evaluation before finds the same and leaves nothing behind."""
    with torch.no_grad():
        without = loss_of(model, values, compute)
    loss = loss_of(model, values, compute)
    places = 4 if name in EVALUATED_BY_ANOTHER_KERNEL else 0
    assert abs(without.item() - loss.item()) <= places * torch.finfo(compute or torch.float32).eps * loss.item()
    return loss


def compare(
    world: World,
    name: str,
    n_ranks: int,
    *,
    n_micro: int = 1,
    max_norm: float | None = None,
    no_sync: bool = False,
    tolerance: float = 0.0,
    **settings: Any,
) -> None:
    expected = reference(
        name,
        n_ranks,
        3,
        precision=settings.get("precision"),
        reduce_precision=settings.get("reduce_precision"),
        n_micro=n_micro,
        sync_every=not no_sync,
        max_norm=max_norm,
        n_ranks_per_shard=settings.get("n_ranks_per_shard"),
        skip_unused=settings.get("find_unused_parameters", False),
        **adamw(max_norm),
    )
    for found in world.run(n_ranks, train, name, n_ranks, 3, n_micro, max_norm, no_sync, settings):
        for key, value in expected.items():
            # frozen weights have no master copy: they stay rounded
            differences = (found[key] - value.to(found[key].dtype)).abs()
            difference = differences.max().item() if value.numel() else 0.0
            assert difference <= tolerance, (key, difference)
