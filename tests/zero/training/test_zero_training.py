"""Sharded training equals training in one process, to the bit: sums are taken in the order of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import compare
from zero_models import make_gpt
from zero_world import World, group_of

from zerotune import zero_runtime


@pytest.mark.parametrize(("name", "n_ranks"), [("gpt", 1), ("gpt", 2), ("gpt", 4), ("odd", 3)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_plain(world: World, name: str, stage: int, n_ranks: int) -> None:
    compare(world, name, n_ranks, stage=stage)


@pytest.mark.parametrize(("stage", "name", "bucket_bytes"), [(1, "odd", 64), (2, "gpt", 1000), (3, "odd", 64)])
def test_small_buckets(world: World, stage: int, name: str, bucket_bytes: int) -> None:
    compare(world, name, 2, stage=stage, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize(
    ("stage", "name", "precision", "reduce_precision"),
    [*((stage, "gpt", "bf16", None) for stage in (1, 2, 3)), (1, "odd", "bf16", "fp32"), (3, "odd", "bf16", "fp32"),
     (2, "gpt", "fp16", None)],
)  # fmt: skip
def test_mixed_precision(world: World, name: str, stage: int, precision: str, reduce_precision: str | None) -> None:
    compare(world, name, 2, stage=stage, precision=precision, reduce_precision=reduce_precision)


@pytest.mark.parametrize(
    ("stage", "no_sync", "precision"), [(1, False, "bf16"), (2, True, None), (3, False, "bf16"), (3, True, None)]
)
def test_accumulation(world: World, stage: int, no_sync: bool, precision: str | None) -> None:
    compare(world, "gpt", 2, stage=stage, n_micro=3, no_sync=no_sync, precision=precision)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_unused_parameters_are_skipped_when_asked(world: World, stage: int) -> None:
    compare(world, "odd", 2, stage=stage, find_unused_parameters=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_clipping(world: World, stage: int) -> None:
    # The norm is a sum over shards rather than over parameters: a relative error of at most n·eps/2 with n the number
    # of elements, and so an error of that times max_norm in each of three steps' gradients.
    n = sum(p.numel() for p in make_gpt().parameters())
    compare(world, "gpt", 2, stage=stage, max_norm=0.1, tolerance=3 * 0.1 * n * torch.finfo(torch.float32).eps / 2)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("n_ranks", "options"),
    [
        (3, {}),
        (2, {"prefetch": 0, "bucket_bytes": 64}),
        (2, {"n_micro": 2, "no_sync": True}),
        (3, {"reshard_after_forward": False}),
    ],
)
def test_ranks_that_use_different_parts(world: World, stage: int, n_ranks: int, options: dict[str, Any]) -> None:
    compare(world, "fickle", n_ranks, stage=stage, **options)


def test_stage_1_with_all_reduce(world: World) -> None:
    compare(world, "gpt", 2, stage=1, all_reduce_gradients=True)


@pytest.mark.parametrize(("prefetch", "reshard"), [(0, True), (2, False), (9, True)])
def test_prefetch_and_reshard_change_no_bit(world: World, prefetch: int, reshard: bool) -> None:
    compare(world, "gpt", 2, stage=3, prefetch=prefetch, reshard_after_forward=reshard)


@pytest.mark.parametrize(
    ("stage", "n_micro", "no_sync"), [(1, 2, True), (2, 2, True), (3, 2, True), (3, 1, False), (2, 2, False)]
)
def test_hybrid_sharding(world: World, stage: int, n_micro: int, no_sync: bool) -> None:
    compare(world, "gpt", 4, stage=stage, n_ranks_per_shard=2, n_micro=n_micro, no_sync=no_sync)


def looked_at_between_passes(stage: int) -> list[float]:
    """Gradients of one each per pass, asked for after the first of two."""
    model = torch.nn.Linear(4, 2, bias=False)
    engine = zero_runtime.shard(model, group=group_of(2), stage=stage, precision="bf16")
    optimizer = engine.optimizer(torch.optim.SGD, lr=1.0)
    with engine.full_parameters(write=True), torch.no_grad():
        model.weight.fill_(8.0)
    for n_pass in range(2):
        model(torch.ones(1, 4)).sum().backward()
        if n_pass == 0:
            engine.finish_gradients()
    optimizer.step()
    return engine.state_dict()["weight"].unique().tolist()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_add_up_after_they_were_looked_at(world: World, stage: int) -> None:
    assert world.run(2, looked_at_between_passes, stage) == [[6.0], [6.0]]
