"""What a block keeps for backward, by the formula and by what torch's autograd saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerotune.tuner.advice.models.model_shape import ModelShape
from zerotune.tuner.advice.prediction.memory import kept_bytes_per_token

N_TOKENS, WIDTH, N_HEADS = 64, 256, 8


class FusedNorm(torch.autograd.Function):
    """RMSNorm as one kernel, which keeps its input alone."""

    @staticmethod
    def forward(context, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype)

    @staticmethod
    def backward(context, gradient: Tensor) -> Tensor:
        return gradient


class Block(nn.Module):
    """A decoder's block."""

    def __init__(self, n_kv_heads: int, ffn_width: int, *, gated: bool, dropout: float) -> None:
        super().__init__()
        of_kv = WIDTH // N_HEADS * n_kv_heads
        self.norms = None if gated else nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, width, bias=False) for width in (WIDTH, of_kv, of_kv))
        self.out, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(ffn_width, WIDTH, bias=False)
        self.up, self.gate = (nn.Linear(WIDTH, ffn_width, bias=False) for _ in range(2))
        self.gated, self.dropout = gated, dropout

    def forward(self, x: Tensor) -> Tensor:
        normed = self._normed(x, 0)
        heads = [part(normed).view(1, N_TOKENS, -1, WIDTH // N_HEADS).transpose(1, 2) for part in self.qkv]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self._dropped(self.out(mixed.transpose(1, 2).reshape(1, N_TOKENS, WIDTH)))
        normed = self._normed(x, 1)
        inner = F.silu(self.gate(normed)) * self.up(normed) if self.gated else F.gelu(self.up(normed))
        return x + self._dropped(self.down(inner))

    def _normed(self, x: Tensor, place: int) -> Tensor:
        return FusedNorm.apply(x) if self.norms is None else self.norms[place](x)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout) if self.dropout else x


def saved_bytes_per_token(block: Block) -> float:
    """Bytes of the storages that wait for backward, parameters left out."""
    block = block.to(torch.bfloat16)
    parameters = {one.data_ptr() for one in block.parameters()}
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    x = torch.ones(1, N_TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True) * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = block(x)
    n_bytes = sum(one.nbytes() for where, one in storages.items() if where not in parameters)
    assert result.requires_grad
    return n_bytes / N_TOKENS


@pytest.mark.parametrize(
    ("n_kv_heads", "ffn_width", "gated", "dropout"),
    [(8, 1024, False, 0.1), (8, 1024, False, 0.0), (8, 688, True, 0.0), (2, 896, True, 0.0), (1, 2048, True, 0.0)],
)
def test_the_formula_is_what_autograd_saves(n_kv_heads: int, ffn_width: int, gated: bool, dropout: float) -> None:
    """Masks of dropout are counted although a model may have none."""
    shape = ModelShape(
        n_layers=1, width=WIDTH, n_heads=N_HEADS, n_kv_heads=n_kv_heads, head_width=WIDTH // N_HEADS,
        ffn_width=ffn_width, gated=gated,
    )  # fmt: skip
    saved = saved_bytes_per_token(Block(n_kv_heads, ffn_width, gated=gated, dropout=dropout))
    assert kept_bytes_per_token(shape, 1, flash=True) == pytest.approx(saved, rel=0.07)
