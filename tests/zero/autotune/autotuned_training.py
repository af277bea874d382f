"""Training whose buckets and depths change underway, and the same training whose do not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerotune import zero_runtime
from zerotune.zero_runtime.autotune.choices import FINEST

BUCKET_BYTES = 8192
N_STEPS = 21


def train(
    group: Any, stage: int, autotune: bool, max_norm: float | None = None, **settings: Any
) -> tuple[list[float], list[Any]]:
    """A small model; the layout is that of the smallest bucket with and without `autotune`.

    Args:
        group: the ranks.
        stage: 1 to 3.
        autotune: buckets and depths change.
        max_norm: gradients are clipped to; None: they are not.
        settings: others of the runtime.

    Returns:
        The loss of each step on this rank, and what each step ran with.
    """
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)), nn.Linear(24, 4))
    bucket = BUCKET_BYTES if autotune else BUCKET_BYTES // FINEST
    engine = zero_runtime.shard(model, group=group, stage=stage, bucket_bytes=bucket, autotune=autotune, **settings)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=0.01)
    draw = torch.Generator().manual_seed(dist.get_rank(group))
    losses: list[float] = []
    ran: list[Any] = []
    asked = None
    for n in range(N_STEPS):
        if autotune and n == 7 and dist.get_rank(group) == 1:
            asked = engine.propose(bucket_bytes=BUCKET_BYTES // 4)
        ran.append(engine.step_settings)
        loss = model(torch.randn(8, 24, generator=draw)).square().mean()
        loss.backward()
        if max_norm is not None:
            engine.clip_grad_norm_(max_norm)
        optimizer.step()
        losses.append(loss.item())
    assert asked is None or asked in ran  # what one rank proposed was tried
    return losses, ran


def both(group: Any, stage: int, max_norm: float | None = None, **settings: Any) -> tuple[bool, list[Any]]:
    """The same with and without changes.

    Args:
        group: the ranks.
        stage: 1 to 3.
        max_norm: as in `train`.
        settings: others of the runtime.

    Returns:
        Whether losses are the same to the bit, and what ran.
    """
    without, _ = train(group, stage, False, max_norm, **settings)
    losses, ran = train(group, stage, True, max_norm, **settings)
    return losses == without, ran
