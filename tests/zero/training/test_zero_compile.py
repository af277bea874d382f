"""torch.compile, of the model or its layers, before sharding or after: trains the same, with as few graphs as alone."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zero_models import DTYPES, MODELS, TINY, gpt_batch, loss_of
from zero_world import World, group_of

from zerotune import zero_runtime
from zerotune.zero_runtime.examples.gpt import GPT
from zerotune.zero_runtime.layout.discovery import default_layers

pytestmark = pytest.mark.slow  # loading the compiler takes longer than all else here
WAYS = ("layers", "layers, before", "model", "model in place")


def train_compiled(
    name: str, stage: int, how: str, precision: str | None = None, backend: str = "aot_eager"
) -> list[float]:
    torch._dynamo.reset()
    make, batch = MODELS[name]
    model = make()
    if how == "layers, before":
        compile_layers(model, backend)
    engine = zero_runtime.shard(model, group=group_of(2), stage=stage, precision=precision)
    optimizer = engine.optimizer(torch.optim.AdamW, lr=1e-2)
    run = torch.compile(model, backend=backend) if how == "model" else model
    if how == "layers":
        compile_layers(model, backend)
    if how == "model in place":
        model.compile(backend=backend)
    losses = []
    for n in range(3):
        loss = loss_of(run, batch(dist.get_rank(), n))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compile_layers(model: nn.Module, backend: str) -> None:
    for layer in default_layers(model):
        layer.compile(backend=backend)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["gpt", "recomputed", "adapted", "shared-by-layers", "again-at-the-end"])
def test_compiled_training_is_the_same(world: World, name: str, stage: int, precision: str | None, how: str) -> None:
    compiled, plain = (world.run(2, train_compiled, name, stage, way, precision) for way in (how, "not"))
    assert compiled == plain


def train_alone(name: str, n_ranks: int, precision: str | None, backend: str = "aot_eager") -> list[list[float]]:
    """What plain torch makes of the batches of all ranks with compiled layers; the losses by rank."""
    torch._dynamo.reset()
    make, batch = MODELS[name]
    model = make()
    compute = DTYPES[precision]
    masters = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data.to(compute or p.dtype)
    compile_layers(model, backend)
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    losses: list[list[float]] = [[] for _ in range(n_ranks)]
    for n in range(3):
        for rank in range(n_ranks):
            loss = loss_of(model, batch(rank, n), compute)
            loss.backward()
            losses[rank].append(loss.item())
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = torch.zeros_like(master) if p.grad is None else (p.grad / n_ranks).to(master.dtype)
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return losses


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["layers", "model"])
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5", "vit"])
def test_compiled_transformers_train_the_same(world: World, name: str, precision: str | None, how: str) -> None:
    """As compiled layers do without us: all of T5's decoder reads what its encoder returned, and graphs change the
    order in which autograd adds those gradients."""
    pytest.importorskip("transformers")
    assert world.run(2, train_compiled, name, 3, how, precision) == world.run(1, train_alone, name, 2, precision)[0]


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for the CPU with g++")
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("name", ["gpt", "recomputed"])
def test_inductors_layers_train_the_same(world: World, name: str, precision: str | None) -> None:
    """Its kernels read parameters at addresses that stage 3 gathers into anew, and fuse as they do without us."""
    found = world.run(2, train_compiled, name, 3, "layers", precision, "inductor")
    assert found == world.run(1, train_alone, name, 2, precision, "inductor")[0]


def graph_sizes(how: str) -> list[list[int]]:
    """Operations of each graph made in each of three steps of stage 3 on twelve layers."""
    torch._dynamo.reset()
    made: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        made.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model = GPT(dataclasses.replace(TINY, n_layers=12))
    engine = zero_runtime.shard(model, group=group_of(2), stage=3)
    optimizer = engine.optimizer(torch.optim.SGD, lr=0.1)
    for block in model.blocks:
        if how == "layers":
            block.compile(backend=backend)
    run = torch.compile(model, backend=backend) if how == "model" else model
    steps = []
    for n in range(3):
        made.clear()
        run(*gpt_batch(0, n)).backward()
        optimizer.step()
        steps.append(sorted(made))
    return steps


def test_all_layers_share_one_graph_that_is_made_once(world: World) -> None:
    """Gathering and freeing happen between graphs: a layer is one graph, and its unit's state does not recompile it."""
    for first, *later in world.run(2, graph_sizes, "layers"):
        assert len(first) == 1
        assert later == [[], []]
    for first, *later in world.run(2, graph_sizes, "model"):
        assert later == [[], []]
        assert first[-1] >= 15 > 2 >= first[-2]  # a layer's, and what the root does by itself
