"""How long one block's computation takes, from multiplications, memory traffic and kernel launches."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from zerotune.tuner.advice.configuration import Software
from zerotune.tuner.advice.constants import Constants
from zerotune.tuner.advice.hardware.gpus import Gpu
from zerotune.tuner.advice.models.model_shape import ModelShape
from zerotune.tuner.advice.prediction.memory import kept_bytes_per_token


class BlockTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one block's forward for one micro-batch."""

    multiplying_s: float
    attention_s: float
    traffic_s: float
    """Element-wise operations, bound by memory."""
    waiting_s: float
    """For the CPU to launch."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.multiplying_s + self.attention_s + self.traffic_s + self.waiting_s


def nearest_share(shares: Mapping[int, float], capability: int) -> int:
    """The generation whose share counts for another: the newest that is not newer."""
    return max((known for known in shares if known <= capability), default=min(shares))


def matmul_share(constants: Constants, capability: int) -> float:
    """What large multiplications reach on that generation."""
    return constants.matmul_shares[nearest_share(constants.matmul_shares, capability)]


def block_forward(
    shape: ModelShape, n_tokens: float, n_model_parallel: int, gpu: Gpu, software: Software, constants: Constants
) -> BlockTime:
    """Forward through one block.

    A multiplication of (m, k) with (k, n) reaches the generation's share of the peak, less what tiles at the edges
    waste: each width w counts as w / (w + `half_width`). Memory moves `traffic` times what a block keeps.

    Args:
        shape: of the model.
        n_tokens: of one micro-batch.
        n_model_parallel: ranks that split the block.
        gpu: where.
        software: precision, fused attention, compiler.
        constants: what datasheets do not tell.

    Returns:
        Seconds by kind.
    """
    rate = 1e12 * gpu.peak(software.precision) * matmul_share(constants, gpu.capability)
    split = n_model_parallel

    def seconds(inner: float, outer: float, count: float = 1.0) -> float:
        waste = 1.0
        for width in (n_tokens, inner, outer):
            waste *= 1 + constants.half_width / width
        return count * 2 * n_tokens * inner * outer * waste / rate

    multiplying = (
        seconds(shape.width, (shape.query_width + 2 * shape.kv_width) / split, shape.n_attentions)
        + seconds(shape.query_width / split, shape.width, shape.n_attentions)
    )
    for ffn, count in ((shape.ffn_width / split, shape.n_active_experts), (shape.shared_ffn_width / split, 1)):
        if ffn:
            multiplying += seconds(shape.width, ffn, (2 if shape.gated else 1) * count)
            multiplying += seconds(ffn, shape.width, count)
    attention_flops = n_tokens * shape.attention_flops_per_token / split
    if software.flash:
        attention = attention_flops * (0.5 if shape.causal else 1.0) / (rate * constants.attention_share)
    else:
        attention = attention_flops * (1 + constants.half_width / shape.head_width) / rate
    element = 4 if software.precision == "fp32" else 2
    kept = kept_bytes_per_token(shape, split, flash=software.flash, element_bytes=element)
    moved = n_tokens * kept * constants.traffic * (constants.compiled_traffic if software.compiled else 1.0)
    traffic = moved / (1e9 * gpu.memory_gbs)
    n_kernels = constants.kernels_per_block * (constants.compiled_traffic if software.compiled else 1.0)
    busy = multiplying + attention + traffic
    return BlockTime(
        multiplying_s=multiplying,
        attention_s=attention,
        traffic_s=traffic,
        waiting_s=max(0.0, n_kernels * constants.launch_s - busy),
    )


def loss_s(
    shape: ModelShape, n_tokens: float, n_model_parallel: int, gpu: Gpu, software: Software, constants: Constants
) -> tuple[float, float]:
    """Head and loss for one micro-batch.

    Args:
        shape: of the model.
        n_tokens: of one micro-batch.
        n_model_parallel: ranks that split the vocabulary.
        gpu: where.
        software: precision.
        constants: what datasheets do not tell.

    Returns:
        Seconds forward, and backward.
    """
    rate = 1e12 * gpu.peak(software.precision) * matmul_share(constants, gpu.capability)
    words = shape.vocabulary / n_model_parallel
    multiplying = 2 * n_tokens * shape.words_width * words * (1 + constants.half_width / n_tokens) / rate
    moved_s = n_tokens * words * constants.logit_bytes / (1e9 * gpu.memory_gbs)
    return multiplying + moved_s, 2 * multiplying + moved_s


def optimizer_s(n_parameters: float, gpu: Gpu, constants: Constants) -> float:
    """An optimizer step, bound by memory.

    Args:
        n_parameters: whose states the rank has.
        gpu: where.
        constants: bytes that move per parameter.

    Returns:
        Seconds.
    """
    return n_parameters * constants.optimizer_bytes / (1e9 * gpu.memory_gbs)
