"""torch.compile: stages 1 and 2 train the same under it, stage 3 refuses it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from zero_models import gpt_batch, make_gpt
from zero_world import World, group_of

from zerotune import zero_runtime

pytestmark = pytest.mark.slow  # loading the compiler takes longer than all else here
WAYS = ("layers", "layers, before", "model", "model in place")


def train_compiled(stage: int, how: str) -> list[float]:
    torch._dynamo.reset()
    model = make_gpt()
    if how == "layers, before":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    engine = zero_runtime.shard(model, group=group_of(2), stage=stage)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-2)
    run = torch.compile(model, backend="aot_eager") if how == "model" else model
    if how == "layers":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if how == "model in place":
        model.compile(backend="aot_eager")
    losses = []
    for n in range(3):
        loss = run(*gpt_batch(dist.get_rank(), n))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def refused(how: str) -> str:
    try:
        train_compiled(3, how)
    except zero_runtime.LifecycleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("stage", [1, 2])
def test_compiled_training_is_the_same(world: World, stage: int, how: str) -> None:
    assert world.run(2, train_compiled, stage, how) == world.run(2, train_compiled, stage, "not")


@pytest.mark.parametrize("how", WAYS)
def test_stage_3_refuses_to_be_compiled(world: World, how: str) -> None:
    for message in world.run(2, refused, how):
        assert re.match(r"stage 3 .*torch\.compile", message)
