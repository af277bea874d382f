"""P_a over a tensor-parallel GPT, alone and under ZeRO, on 2 × 2 ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensor_parallel_gpt import ParallelGPT
from torch import Tensor
from zero_models import TINY, gpt_batch, make_gpt
from zero_world import World

from zerotune import zero_runtime
from zerotune.zero_runtime.layout.groups import hybrid_groups
from zerotune.zero_runtime.stages.activations import PartitionedActivations

Result = dict[str, Any]


def train_2x2(stage: int, mode: str) -> Result:
    """Ranks (0,1) and (2,3) are model-parallel pairs; (0,2) and (1,3) share states."""
    world = dist.group.WORLD
    assert world is not None
    pair, across = hybrid_groups(world, 2)
    assert across is not None
    run = None if mode == "none" else PartitionedActivations(pair, offload=mode == "cpu")
    torch.manual_seed(7)
    model = ParallelGPT(TINY, pair, run)
    engine = zero_runtime.shard(model, group=across, stage=stage)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    losses = []
    for n in range(3):
        loss = model(*gpt_batch(dist.get_rank(across), n))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "kept_bytes": run.kept_bytes if run else 0,
        "n_gathers": run.n_gathers if run else 0,
        "values": engine.state_dict(),
    }


@pytest.fixture(scope="module", params=[2, 3])
def plain(world: World, request: pytest.FixtureRequest) -> tuple[int, list[Result]]:
    """A stage, and what each rank has under it where nothing is partitioned."""
    return request.param, world.run(4, train_2x2, request.param, "none")


@pytest.mark.parametrize("mode", ["P_a", "cpu"])
def test_partitioning_changes_no_bit_and_halves_kept_activations(
    world: World, plain: tuple[int, list[Result]], mode: str
) -> None:
    stage, unpartitioned = plain
    found = world.run(4, train_2x2, stage, mode)
    block_bytes = 2 * TINY.n_context * TINY.width * 4
    for a, b in zip(unpartitioned, found, strict=True):
        assert a["losses"] == b["losses"]
        assert all(torch.equal(v, b["values"][k]) for k, v in a["values"].items())
        assert b["n_gathers"] == 3 * TINY.n_layers  # one per block and step
        assert b["kept_bytes"] == 3 * TINY.n_layers * block_bytes // 2


def clip_2x2(stage: int, norm_type: float) -> list[float]:
    world = dist.group.WORLD
    assert world is not None
    pair, across = hybrid_groups(world, 2)
    torch.manual_seed(7)
    model = ParallelGPT(TINY, pair)
    engine = zero_runtime.shard(model, group=across, model_parallel_group=pair, stage=stage, bucket_bytes=2048)
    optimizer = engine.optimizer(torch.optim.SGD, lr=1.0)
    norms = []
    for n in range(3):
        model(*gpt_batch(dist.get_rank(across), n)).backward()
        norms.append(engine.clip_grad_norm_(0.3, norm_type).item())
        optimizer.step()
    return norms


@pytest.mark.parametrize(("stage", "norm_type"), [(1, 2.0), (2, 1.0), (3, 2.0), (3, float("inf"))])
def test_the_norm_of_a_split_model_is_that_of_the_whole(world: World, stage: int, norm_type: float) -> None:
    model = make_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = []
    for n in range(3):
        (sum(model(*gpt_batch(rank, n)) for rank in range(2)) / 2).backward()
        expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3, norm_type).item())
        optimizer.step()
        optimizer.zero_grad()
    found = world.run(4, clip_2x2, stage, norm_type)
    assert found[1:] == found[:-1]
    # what replicated parameters would add if counted twice is a part in ten or more; roundings a few in 10⁶
    assert found[0] == pytest.approx(expected, rel=1e-5)


def tamper_2x2() -> str:
    world = dist.group.WORLD
    assert world is not None
    pair, across = hybrid_groups(world, 2)
    torch.manual_seed(7)
    model = ParallelGPT(TINY, pair)
    zero_runtime.shard(model, group=across, model_parallel_group=pair, stage=3, debug=True)
    if dist.get_rank() == 3:
        model.norm.weight.data = torch.ones(TINY.width)
    try:
        model(*gpt_batch(0, 0)).backward()
    except zero_runtime.LifecycleError as error:
        return str(error)
    return ""


def test_a_mistake_is_heard_of_across_both_kinds_of_parallelism(world: World) -> None:
    messages = world.run(4, tamper_2x2)
    assert re.match("parameter norm.weight .*rank 3", messages[0])
    assert len(set(messages)) == 1


def test_tensor_parallel_under_zero_trains_like_one_process(world: World) -> None:
    model = make_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected = []
    for n in range(3):
        losses: list[Tensor] = [model(*gpt_batch(rank, n)) for rank in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append([loss.item() for loss in losses])
    found = world.run(4, train_2x2, 3, "none")
    for rank, result in enumerate(found):
        for n, loss in enumerate(result["losses"]):
            # sums of products are cut in two: a few roundings of fp32 in losses of about 4
            assert abs(loss - expected[n][rank // 2]) < 4 * 2.0**-24 * 4 * TINY.width * TINY.n_layers
