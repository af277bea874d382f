"""Small models of several families, to be trained by several frameworks: what differs is which sizes they move.

Each has `blocks` (what sharding frameworks wrap one by one) and returns a loss from one integer tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        attended: Tensor = self.out(F.scaled_dot_product_attention(q, k, v))
        return x + attended


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + fed


class Convolution(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(n_in, n_out, 3, padding=1), nn.Conv1d(n_out, n_out, 3, padding=1)
        self.norm = nn.BatchNorm1d(n_out)

    def forward(self, x: Tensor) -> Tensor:
        convolved: Tensor = self.norm(self.second(F.relu(self.first(x.transpose(1, 2)))))
        return convolved.transpose(1, 2)


class Experts(nn.Module):
    """A gate and several experts, all of them on every rank."""

    def __init__(self, width: int, n_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, n_experts)
        self.experts = nn.ModuleList(FeedForward(width, 2 * width) for _ in range(n_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum((weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts)), torch.zeros_like(x))


class Stack(nn.Module):
    def __init__(self, width: int, n_tokens: int, blocks: Sequence[nn.Module], out_width: int | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(n_tokens, width)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(out_width or width, n_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def gpt(width: int, depth: int, n_tokens: int = 256) -> Stack:
    """A small GPT.

    Args:
        width: of its layers.
        depth: blocks.
        n_tokens: size of the vocabulary.

    Returns:
        The model.
    """
    return Stack(
        width, n_tokens, [nn.Sequential(Attention(width), FeedForward(width, 4 * width)) for _ in range(depth)]
    )


def mlp(width: int, depth: int) -> Stack:
    return Stack(width, 64, [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)])


def vit(width: int, depth: int) -> Stack:
    return gpt(width, depth, n_tokens=16)


def t5(width: int, depth: int) -> Stack:
    encoder = [nn.Sequential(Attention(width), FeedForward(width, 3 * width)) for _ in range(depth)]
    decoder = [nn.Sequential(Attention(width), Attention(width), FeedForward(width, 3 * width)) for _ in range(depth)]
    return Stack(width, 512, [*encoder, *decoder])


def conv(width: int, depth: int) -> Stack:
    widths = [width * 2 ** (i // 2) for i in range(depth + 1)]
    blocks = [Convolution(a, b) for a, b in pairwise(widths)]
    return Stack(width, 64, blocks, out_width=widths[-1])


def moe(width: int, depth: int) -> Stack:
    return Stack(width, 128, [nn.Sequential(Attention(width), Experts(width, 4)) for _ in range(depth)])


MODELS: dict[str, Callable[[], Stack]] = {
    "gpt-3x128": lambda: gpt(128, 3),
    "gpt-8x96": lambda: gpt(96, 8),
    "gpt-14x64": lambda: gpt(64, 14),
    "mlp-6x256": lambda: mlp(256, 6),
    "conv-6": lambda: conv(32, 6),
    "moe-3x64": lambda: moe(64, 3),
    "t5-3x96": lambda: t5(96, 3),
    "vit-5x128": lambda: vit(128, 5),
}


class _Copy(torch.autograd.Function):
    """Forward: nothing; backward: sum over the group (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Forward: sum over the group; backward: nothing (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ParallelPart(nn.Module):
    """One column-parallel and one row-parallel matrix, as Megatron cuts attention and MLP alike."""

    def __init__(self, width: int, inner: int, group: Any) -> None:
        super().__init__()
        share = inner // dist.get_world_size(group)
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, share)
        self.down = nn.Linear(share, width, bias=False)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        # torch has no types for Function.apply.
        inside = F.gelu(self.up(_Copy.apply(self.norm(x), self._group)))  # type: ignore[no-untyped-call]
        summed: Tensor = _Sum.apply(self.down(inside), self._group)  # type: ignore[no-untyped-call]
        return x + summed


class ParallelStack(Stack):
    """`keep` checkpoints each block, e.g. with partitioned activations; None keeps everything."""

    def __init__(self, width: int, depth: int, group: Any, keep: Any = None) -> None:
        def block() -> nn.Module:
            return nn.Sequential(ParallelPart(width, 3 * width, group), ParallelPart(width, 4 * width, group))

        super().__init__(width, 256, [block() for _ in range(depth)])
        self._keep = keep

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = self._keep(block, x) if self._keep is not None else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
