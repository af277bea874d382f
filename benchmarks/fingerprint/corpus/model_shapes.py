"""Shapes of models for the generator: how many parameters each block has, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class ModelShape:
    """Elements of every parameter: of the blocks in forward order, and of the tensors outside them."""

    family: str
    first: tuple[int, ...]
    """Before the blocks: embeddings."""
    blocks: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]
    """After the blocks: final norm, head."""
    width: int
    has_buffers: bool = False
    """Batch norm statistics, which DDP broadcasts before each forward."""


def draw(family: str, rng: np.random.Generator) -> ModelShape:
    """A model of `family` (a key of FAMILIES) of random width and depth."""
    width = int(rng.choice([64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120]))
    depth = int(np.exp(rng.uniform(np.log(2), np.log(61))))
    return FAMILIES[family](width, depth, rng)


def _attention(h: int, n_kv: int = 0) -> tuple[int, ...]:
    kv = n_kv or h
    return (h, h, h * (h + 2 * kv), h + 2 * kv, h * h, h)


def _feed_forward(h: int, inner: int) -> tuple[int, ...]:
    return (h, h, h * inner, inner, inner * h, h)


def _gpt(h: int, depth: int, rng: np.random.Generator) -> ModelShape:
    vocabulary = int(rng.choice([256, 1000, 32000, 50304]))
    head = (h, h, vocabulary * h) if rng.random() < 0.5 else (h, h)
    return ModelShape("gpt", (vocabulary * h, 1024 * h), (_attention(h) + _feed_forward(h, 4 * h),) * depth, head, h)


def _llama(h: int, depth: int, rng: np.random.Generator) -> ModelShape:
    vocabulary, inner, kv = int(rng.choice([32000, 128256])), int(rng.choice([8, 11, 14])) * h // 4, h // 4
    block = (h, h * h, h * kv, h * kv, h * h, h, h * inner, h * inner, inner * h)
    return ModelShape("llama", (vocabulary * h,), (block,) * depth, (h, vocabulary * h), h)


def _mlp(h: int, depth: int, rng: np.random.Generator) -> ModelShape:
    return ModelShape("mlp", (int(rng.choice([16, 784, 4096])) * h, h), ((h * h, h),) * depth, (10 * h, 10), h)


def _conv(h: int, depth: int, rng: np.random.Generator) -> ModelShape:
    widths = [min(2048, max(16, h // 8) * 2 ** (4 * i // max(1, depth))) for i in range(depth + 1)]
    blocks = tuple(
        (9 * a * b, b, b, 9 * b * b, b, b) if i % 2 else (a * b, b, b, 9 * b * b, b, b)
        for i, (a, b) in enumerate(pairwise(widths))
    )
    return ModelShape("conv", (147 * widths[0], widths[0]), blocks, (1000 * widths[-1], 1000), h, has_buffers=True)


def _moe(h: int, depth: int, rng: np.random.Generator) -> ModelShape:
    n_experts, inner = int(rng.choice([4, 8, 16])), int(rng.choice([1, 2, 4])) * h
    expert = (h * inner, inner * h)
    dense, sparse = _attention(h) + _feed_forward(h, 4 * h), (*_attention(h), h * n_experts, *expert * n_experts)
    every = int(rng.choice([1, 2]))
    blocks = tuple(sparse if i % every == 0 else dense for i in range(depth))
    return ModelShape("moe", (32000 * h,), blocks, (h, h), h)


def _t5(h: int, depth: int, rng: np.random.Generator) -> ModelShape:
    inner = int(rng.choice([3, 4])) * h
    encoder = (h, *(h * h,) * 4, h, h * inner, inner * h)
    decoder = (h, *(h * h,) * 4, h, *(h * h,) * 4, h, h * inner, inner * h)
    half = max(1, depth // 2)
    return ModelShape("t5", (32128 * h,), (encoder,) * half + (decoder,) * half, (h,), h)


def _vit(h: int, depth: int, rng: np.random.Generator) -> ModelShape:
    block = _attention(h) + _feed_forward(h, 4 * h)
    return ModelShape("vit", (768 * h, h, 197 * h), (block,) * depth, (h, h, 1000 * h, 1000), h)


def _unet(h: int, depth: int, rng: np.random.Generator) -> ModelShape:
    widths = [max(16, h // 4) * (1 + min(i, depth - 1 - i)) for i in range(depth)]
    blocks = tuple((9 * w * w, w, 9 * w * w, w, w, w, *((4 * w * w,) if i % 2 else ())) for i, w in enumerate(widths))
    return ModelShape("unet", (27 * widths[0], 4 * widths[0] ** 2), blocks, (27 * widths[-1],), h)


FAMILIES = {
    "gpt": _gpt, "llama": _llama, "mlp": _mlp, "conv": _conv, "moe": _moe, "t5": _t5, "vit": _vit, "unet": _unet,
}  # fmt: skip
