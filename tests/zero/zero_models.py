"""Small models and the single-process training that sharded training must equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformer_models import TRANSFORMERS
from wrapped_models import WRAPPED

from zerotune.zero_runtime.examples.gpt import GPT, GPTShape

TINY = GPTShape(n_tokens=61, n_context=8, n_layers=3, n_heads=2, width=12)


class Odd(nn.Module):
    """Odd shapes, a scalar, a tie, a frozen weight and one that the forward never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7, bias=False)])
        self.inner[2].weight = self.inner[0].weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(7, 5)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(5, 3)
        self.unused = nn.Parameter(torch.ones(13))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = torch.tanh(layer(x)) * self.gain
        return self.last(self.frozen(x)).float().square().mean()


def make_gpt() -> nn.Module:
    torch.manual_seed(7)
    return GPT(TINY)


def gpt_batch(rank: int, step: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    rows = torch.randint(TINY.n_tokens, (2, TINY.n_context + 1), generator=draw)
    return rows[:, :-1], rows[:, 1:]


def make_odd() -> nn.Module:
    torch.manual_seed(7)
    return Odd()


def odd_batch(rank: int, step: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(4, 7, generator=draw),)


class Fickle(nn.Module):
    """Uses what it is told to: `uses[i]` is 0 to skip layer i, 1 to use its weight, 2 also its gain; the root's
    gain goes with the first layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gained() for _ in range(4))
        self.gain = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, uses: Tensor) -> Tensor:
        for layer, use in zip(self.layers, uses.tolist(), strict=True):
            if use:
                x = layer(x, use == 2)
        if uses[0] == 2:
            x = x * self.gain
        return self.head(x).float().square().mean()


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(5))
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, gained: bool) -> Tensor:
        x = torch.tanh(self.linear(x))
        return x * self.gain if gained else x


def make_fickle() -> nn.Module:
    torch.manual_seed(7)
    return Fickle()


def fickle_batch(rank: int, step: int) -> tuple[Tensor, ...]:
    """Every rank skips other layers and parameters in every step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 5, generator=draw), torch.randint(3, (4,), generator=draw)


Batch = tuple[Tensor, ...] | dict[str, Tensor]
"""What a model is called with, by position or by name."""

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "gpt": (make_gpt, gpt_batch),
    "odd": (make_odd, odd_batch),
    "fickle": (make_fickle, fickle_batch),
    **WRAPPED,
    **TRANSFORMERS,
}
DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def loss_of(model: Callable[..., Any], batch: Batch, dtype: torch.dtype | None = None) -> Tensor:
    """The model's loss, its inputs in `dtype`."""

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if dtype and t.is_floating_point() else t

    if isinstance(batch, dict):
        loss: Tensor = model(**{name: cast(value) for name, value in batch.items()}).loss
    else:
        loss = model(*map(cast, batch))
    return loss


def _add(sums: list[Tensor | None], more: list[Tensor | None]) -> None:
    for i, found in enumerate(more):
        if found is not None:
            sums[i] = found.clone() if sums[i] is None else sums[i] + found


def reference(
    name: str,
    n_ranks: int,
    n_steps: int,
    *,
    precision: str | None = None,
    reduce_precision: str | None = None,
    n_micro: int = 1,
    sync_every: bool = True,
    max_norm: float | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    skip_unused: bool = False,
    n_ranks_per_shard: int | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Trains in one process what `n_ranks` ranks would: their gradients one by one, added in rank order.

    With hybrid sharding, in rank order within each shard group, and then the groups' sums.
    """
    width = n_ranks_per_shard or n_ranks
    make, batch = MODELS[name]
    model = make()
    masters = [p.detach().clone().requires_grad_(p.requires_grad) for p in model.parameters()]
    compute, summed = DTYPES[precision], DTYPES[reduce_precision or precision]
    if compute:
        for p in model.parameters():  # buffers stay: rounded frequencies of a rotary embedding are other frequencies
            p.data = p.data.to(compute) if p.is_floating_point() else p.data
    step = optimizer([m for m in masters if m.requires_grad], **options)
    for n in range(n_steps):
        totals: list[Tensor | None] = [None] * len(masters)
        rounds = [[m] for m in range(n_micro)] if sync_every else [list(range(n_micro))]
        for micros in rounds:
            sums: list[Tensor | None] = [None] * len(masters)
            groups: list[list[Tensor | None]] = []
            for rank in range(n_ranks):
                if rank % width == 0:
                    groups.append([None] * len(masters))
                local: list[Tensor | None] = [None] * len(masters)
                for micro in micros:
                    loss_of(model, batch(rank, n * n_micro + micro), compute).backward()
                    for i, p in enumerate(model.parameters()):
                        if p.grad is not None:
                            grad = p.grad.to(summed or p.dtype)
                            if grad.dtype == torch.float16:
                                grad = grad * (1.0 / n_ranks)  # before the sum, lest it overflow
                            local[i] = grad if local[i] is None else local[i] + grad
                        p.grad = None
                _add(groups[-1], local)
            for group in groups:
                _add(sums, group)
            for i, found in enumerate(sums):
                if found is not None:
                    # the runtime multiplies when it sets and fuses multiply and add when it accumulates
                    scale = 1.0 if found.dtype == torch.float16 else 1.0 / n_ranks
                    totals[i] = found * scale if totals[i] is None else totals[i].add(found, alpha=scale)
        for master, total in zip(masters, totals, strict=True):
            if master.requires_grad and (total is not None or not skip_unused):
                master.grad = (torch.zeros_like(master) if total is None else total.to(master.dtype)).clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([m for m in masters if m.grad is not None], max_norm)
        step.step()
        step.zero_grad()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return {name: m.detach() for (name, _), m in zip(model.named_parameters(), masters, strict=True)}
