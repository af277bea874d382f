"""Predicts one block's computation time from multiplications, memory traffic and kernel launches."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..problem import Problem
from .memory import kept_bytes_per_token


class BlockTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one block's forward for one micro-batch."""

    multiplying_s: float
    attention_s: float
    traffic_s: float
    """Time of element-wise operations, which memory bounds."""
    waiting_s: float
    """Time of waiting for the CPU's launches."""

    @property
    def total_s(self) -> float:
        """The whole time."""
        return self.multiplying_s + self.attention_s + self.traffic_s + self.waiting_s


def nearest_share(shares: Mapping[int, float], capability: int) -> int:
    """The generation whose constants apply to another one: the newest that is not newer."""
    return max((known for known in shares if known <= capability), default=min(shares))


def _multiplying_rate(problem: Problem) -> float:
    """Operations per second of large multiplications."""
    gpu, shares = problem.cluster.gpu, problem.constants.matmul_shares
    return 1e12 * gpu.peak(problem.software.precision) * shares[nearest_share(shares, gpu.capability)]


def block_forward(problem: Problem, n_tokens: float, split: int) -> BlockTime:
    """Forward of `n_tokens` through one block, for one of the `split` ranks that share it.

    A multiplication of (m, k) with (k, n) reaches the generation's share of the peak, less the waste of tiles at the
    edges: each width w counts as w / (w + `half_width`). Memory moves `traffic` times the bytes that a block keeps.
    """
    shape, gpu, software, constants = problem.shape, problem.cluster.gpu, problem.software, problem.constants
    rate = _multiplying_rate(problem)

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


def loss_s(problem: Problem, n_tokens: float, split: int) -> tuple[float, float]:
    """Forward and backward times of head and loss for one micro-batch; `split` ranks share the vocabulary."""
    shape, constants = problem.shape, problem.constants
    words = shape.vocabulary / split
    waste = 1 + constants.half_width / n_tokens
    multiplying = 2 * n_tokens * shape.words_width * words * waste / _multiplying_rate(problem)
    moved_s = n_tokens * words * constants.logit_bytes / (1e9 * problem.cluster.gpu.memory_gbs)
    return multiplying + moved_s, 2 * multiplying + moved_s


def optimizer_s(problem: Problem, n_parameters: float) -> float:
    """Time of an optimizer step on the states of `n_parameters`, which memory bounds."""
    return n_parameters * problem.constants.optimizer_bytes / (1e9 * problem.cluster.gpu.memory_gbs)
