"""The common parts of job shapes: the job, a small model, its data, and the register of shapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import torch
import torch.distributed as dist
from torch import nn

WIDTH: Final = 64
"""Features of the small model's inputs and outputs."""
PACE_S: Final = 0.008
"""The least duration of a step: a daemon needs wall time to react to a job of a few hundred steps."""


class Job:
    """One rank of one job."""

    def __init__(self, rank: int, n_ranks: int, folder: Path, n_restarts: int, log: IO[str]) -> None:
        self.rank, self.n_ranks, self.folder, self.n_restarts = rank, n_ranks, folder, n_restarts
        self._log = log
        self._paced_at_s = 0.0

    def say(self, *losses: torch.Tensor | float) -> None:
        """Log the losses of one step, to the last bit."""
        print(*(float(loss).hex() for loss in losses), file=self._log, flush=True)
        left_s = self._paced_at_s + PACE_S - time.monotonic()
        if left_s > 0.0:
            time.sleep(left_s)
        self._paced_at_s = time.monotonic()

    def batch(self, step: int, n_rows: int = 8) -> torch.Tensor:
        draw = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randn(n_rows, WIDTH, generator=draw)


@dataclass(frozen=True)
class Shape:
    """One kind of job. `run` is called on every rank, after the default group was made if `makes_group`."""

    run: Callable[[Job], None]
    n_ranks: int
    makes_group: bool
    max_restarts: int

    @property
    def name(self) -> str:
        return self.run.__name__


SHAPES: Final[dict[str, Shape]] = {}


def shape(
    n_ranks: int = 2, *, makes_group: bool = True, max_restarts: int = 0
) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    def register(run: Callable[[Job], None]) -> Callable[[Job], None]:
        SHAPES[run.__name__] = Shape(run, n_ranks, makes_group, max_restarts)
        return run

    return register


def mlp(n_blocks: int = 3, width: int = 256) -> nn.Sequential:
    """The same small model on every rank."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, WIDTH)) for _ in range(n_blocks)]
    return nn.Sequential(*blocks)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(batch).pow(2).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def load_flat(model: nn.Module, values: torch.Tensor) -> None:
    nn.utils.vector_to_parameters(values, model.parameters())


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The gradient averaging of DDP, by hand."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=group)
