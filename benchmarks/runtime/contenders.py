"""The contenders of `zero_vs_peers`: the trained model, and one training step of our runtime and of each peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Step = Callable[[Any], None]


@dataclass(frozen=True)
class Load:
    n_layers: int
    width: int
    n_context: int
    batch: int

    @property
    def tokens_per_step(self) -> int:
        """Of one rank."""
        return self.batch * self.n_context

    def model(self) -> Any:
        from zerotune.zero_runtime.examples.gpt import GPT, GPTShape

        return GPT(GPTShape(n_context=self.n_context, n_layers=self.n_layers, n_heads=4, width=self.width))

    def draw(self) -> Any:
        """A random batch: tokens and targets."""
        import torch

        rows = torch.randint(256, (self.batch, self.n_context + 1))
        return rows[:, :-1], rows[:, 1:]

    def loss(self, model: Any, batch: Any) -> Any:
        return model(*batch)

    def layers(self, model: Any) -> list[Any]:
        return list(model.blocks)


LOADS = {
    "tiny": Load(n_layers=4, width=320, n_context=128, batch=4),  # about 5 million parameters
    "medium": Load(n_layers=8, width=752, n_context=64, batch=2),  # about 55 million
}


def build(name: str, load: Load, precision: str = "fp32", lr: float = 1e-3) -> Step:
    """One training step of a contender, as a function of a batch."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(1)
    model = load.model().train()
    kind, _, variant = name.partition("-")
    if kind == "deepspeed":
        return _deepspeed(model, load, int(variant), precision, lr)
    optimizer: Any
    if kind == "ours":
        from zerotune import zero_runtime

        engine = zero_runtime.shard(model, stage=int(variant), precision=None if precision == "fp32" else precision)
        optimizer = engine.optimizer(torch.optim.AdamW, lr=lr)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        dtype = None if precision == "fp32" else torch.bfloat16
        options: Any = {
            "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
            "reshard_after_forward": variant == "r",
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype),
        }
        for block in load.layers(model):
            fully_shard(block, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(batch: Any) -> None:
        load.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(model: Any, load: Load, stage: int, precision: str, lr: float) -> Step:
    import deepspeed
    import torch

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": precision == "bf16"},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step(batch: Any) -> None:
        engine.backward(load.loss(engine, batch))
        engine.step()

    return step
