"""fp16 with dynamic loss scaling."""

from __future__ import annotations

import torch
from torch import Tensor
from zero_models import gpt_batch, make_gpt
from zero_world import World, group_of

from zerotune import zero_runtime


def scaled_training(n_ranks: int, poison_rank: int | None) -> tuple[dict[str, Tensor], float, int, list[bool]]:
    import torch.distributed as dist

    group = group_of(n_ranks)
    model = make_gpt()
    engine = zero_runtime.shard(model, group=group, stage=2, precision="fp16")
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-3)
    scaler = zero_runtime.LossScaler(engine, initial=1024.0, growth_interval=2)
    stepped = []
    for n in range(4):
        loss = model(*gpt_batch(dist.get_rank(group), n))
        if n == 1 and dist.get_rank(group) == poison_rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_()
        engine.clip_grad_norm_(1.0)
        stepped.append(scaler.step(optimizer))
    return engine.state_dict(), scaler.value, scaler.n_skipped, stepped


def test_an_overflow_on_one_rank_is_skipped_by_all(world: World) -> None:
    for values, scale, n_skipped, stepped in world.run(2, scaled_training, 2, 1):
        assert stepped == [True, False, True, True]
        assert n_skipped == 1
        assert scale == 1024.0  # halved once, doubled after two calm steps
        assert all(torch.isfinite(v).all() for v in values.values())


def scaled_gradient(scale: float) -> list[Tensor]:
    group = group_of(2)
    engine = zero_runtime.shard(make_gpt(), group=group, stage=3, precision="fp16")
    engine.optimizer(torch.optim.SGD, lr=1.0)
    scaler = zero_runtime.LossScaler(engine, initial=scale)
    scaler.scale(engine.model(*gpt_batch(0, 0))).backward()
    scaler.unscale_()
    return [
        shard_slice.parameter.grad.clone()
        for shard_slice in engine.sharded.slices
        if shard_slice.parameter.grad is not None
    ]


def test_unscaled_gradients_do_not_depend_on_the_scale_beyond_what_fp16_loses(world: World) -> None:
    small, large = world.run(2, scaled_gradient, 64.0), world.run(2, scaled_gradient, 4096.0)
    for a, b in zip(small, large, strict=True):
        for x, y in zip(a, b, strict=True):
            # a power of two changes nothing but subnormals: half the least of fp16, 2⁻²⁵, over the scale,
            # once per rank and per operation that rounds; ten of them bound what small models do
            assert (x - y).abs().max() <= 10 * 2 * 2.0**-25 / 64.0 + 2.0**-10 * y.abs().max()
