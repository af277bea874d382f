"""A small model, its data and a training loop, as any project has them; the scripts beside it shard it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import nn

DEEPSPEED_3 = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
"""Has DeepSpeed 3 gather a toy's parameters twice, as it does those of a model that is larger than its defaults."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, n_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(n_blocks))
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--blocks", type=int, default=3)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--losses", type=Path, required=True, help="folder for one file per rank")
    return options


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)  # else what names no device is every rank's on the first GPU, and hangs NCCL
    return device


def model(options: argparse.Namespace) -> Model:
    torch.manual_seed(1)
    return Model(options.blocks, options.width)


def batches(options: argparse.Namespace, rank: int):
    """Each rank's own inputs; the target is the input, turned around."""
    draw = torch.Generator().manual_seed(100 + rank)
    for _ in range(options.steps):
        yield torch.randn(8, options.width, generator=draw).to(device())


def loss_of(trained: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return (trained(inputs).float() - inputs.flip(1)).square().mean()


class LossLog:
    """Every loss of this rank to the last bit."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"rank{rank}.txt").open("w", buffering=1)

    def add(self, loss: torch.Tensor) -> None:
        self._file.write(f"{loss.item().hex()}\n")


def train(trained: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace, rank: int) -> None:
    log = LossLog(options.losses, rank)
    for inputs in batches(options, rank):
        loss = loss_of(trained, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.add(loss)
