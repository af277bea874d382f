"""The small GPT split as Megatron does: attention heads and MLP columns over model-parallel ranks.

The first matrix of each pair is cut by columns and the second by rows, so a block needs two all-reduces
forward and two backward. ZeRO keeps parameters in flat buffers of plain tensors, hence plain slices here
rather than DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zerotune.zero_runtime.examples.gpt import GPT, Block, GPTShape


class _CopyToRanks(torch.autograd.Function):
    """Identity in forward; in backward, the sum of the gradients of all ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' parts in forward; identity for each part's gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Megatron's f."""
    copied: Tensor = _CopyToRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return copied


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Megatron's g."""
    total: Tensor = _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class ParallelBlock(nn.Module):
    """One rank's part of a `Block`."""

    def __init__(self, whole: Block, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        if whole.n_heads % n:
            raise ValueError(f"{whole.n_heads} heads cannot be split over {n} ranks")
        self.n_heads = whole.n_heads // n
        self.norm_attention, self.norm_mlp = whole.norm_attention, whole.norm_mlp

        def part(values: Tensor) -> nn.Parameter:
            parameter = nn.Parameter(values)
            setattr(parameter, "tensor_model_parallel", True)  # noqa: B010  (Megatron's mark, read by clipping)
            return parameter

        def own(weight: Tensor, dim: int) -> nn.Parameter:
            return part(weight.detach().chunk(n, dim)[rank].clone())

        def own_heads(weight: Tensor) -> nn.Parameter:
            q, k, v = weight.detach().chunk(3)
            return part(torch.cat([t.chunk(n)[rank] for t in (q, k, v)]))

        self.qkv_weight, self.qkv_bias = own_heads(whole.qkv.weight), own_heads(whole.qkv.bias)
        self.out_weight, self.out_bias = (
            own(whole.out.weight, 1),
            nn.Parameter(whole.out.bias.detach().clone()),
        )
        self.up_weight, self.up_bias = own(whole.up.weight, 0), own(whole.up.bias, 0)
        self.down_weight, self.down_bias = (
            own(whole.down.weight, 1),
            nn.Parameter(whole.down.bias.detach().clone()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] to the same shape, equal on all ranks of the group."""
        batch, time, _ = x.shape
        inner = copy_to_ranks(self.norm_attention(x), self.group)
        qkv = F.linear(inner, self.qkv_weight, self.qkv_bias)
        q, k, v = qkv.view(batch, time, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = F.linear(mixed.transpose(1, 2).reshape(batch, time, -1), self.out_weight)
        x = x + sum_over_ranks(out, self.group) + self.out_bias
        inner = copy_to_ranks(self.norm_mlp(x), self.group)
        down = F.linear(F.gelu(F.linear(inner, self.up_weight, self.up_bias)), self.down_weight)
        return x + sum_over_ranks(down, self.group) + self.down_bias


class ParallelGPT(GPT):
    """A GPT whose blocks are split over `group`; embeddings and norms are whole on every rank.

    Args:
        run_block: how a block is called, e.g. a `PartitionedActivations`; by default as it is.
    """

    def __init__(
        self, shape: GPTShape, group: dist.ProcessGroup, run_block: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__(shape)
        self.blocks = nn.ModuleList(ParallelBlock(block, group) for block in self.blocks)  # type: ignore[arg-type]
        self.run_block = run_block or (lambda block, x: block(x))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """As `GPT.forward`."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = self.run_block(block, x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
