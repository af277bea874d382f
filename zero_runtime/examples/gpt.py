"""A small GPT on bytes: learned positions, pre-norm blocks, causal attention, tied output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTShape:
    """Sizes of the model: vocabulary, context, layers, heads, width."""

    n_tokens: int = 256
    n_context: int = 128
    n_layers: int = 4
    n_heads: int = 4
    width: int = 128


class Block(nn.Module):
    """Attention and a four times wider MLP, each behind a norm and added to its input [batch, time, width]."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, time, width] to the same shape."""
        batch, time, width = x.shape
        heads = (batch, time, 3, self.n_heads, width // self.n_heads)
        q, k, v = self.qkv(self.norm_attention(x)).view(heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        wider: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + wider


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.n_tokens, shape.width)
        self.positions = nn.Embedding(shape.n_context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.n_tokens, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (2 * shape.n_layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Maps [batch, time] to the mean loss, or to logits [batch, time, n_tokens] without targets."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
