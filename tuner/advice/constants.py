"""Constants beyond datasheets. `python -m benchmarks advise_error --fit` fitted those marked as fitted.

The fit used published runs that are not set aside (benchmarks/advice/published_runs.py), without the ZeRO paper's.
"""

from __future__ import annotations

from typing import Final

import msgspec


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Shares and sizes that hold for all models and clusters alike."""

    matmul_shares: dict[int, float]
    """Of the peak that large multiplications reach, by compute capability; the nearest not newer counts. Fitted from
    Ampere on; Volta's is measured: 95 of 125 TFLOP/s, https://github.com/mli/transformers-benchmarks, which has 0.74 of
    an A100."""
    half_width: float = 128.0
    """Width of a matrix that reaches half of that share; a tile's width."""
    attention_share: float = 0.61
    """Share of a large multiplication's rate that fused attention reaches, counting masked work. Fitted."""
    traffic: float = 3.0
    """Bytes moved in forward for each byte of activations that a block keeps; backward moves twice as many. Fitted."""
    compiled_traffic: float = 0.6
    """Share of `traffic` that is left with torch.compile; assumed, as it makes steps some 15 % faster."""
    network_share: float = 0.73
    """Share of NCCL's own predicted bandwidth that training gets. Fitted."""
    contention: float = 0.48
    """Share of time that computation loses while the network works beside it. Fitted."""
    launch_s: float = 4e-6
    """CPU time per kernel, below which a GPU waits for the next."""
    kernels_per_block: int = 30
    """Kernels of a block's forward without a compiler; backward has twice as many."""
    optimizer_bytes: float = 38.0
    """Bytes that an optimizer step moves per parameter: four fp32 values read, three written, 16-bit copy, norm."""
    usable_memory: float = 0.91
    """Share of a GPU's memory; the rest is lost to fragments (ZeRO paper, section 3.2: up to 30 % without M_D)."""
    headroom: float = 0.0
    """Share of a GPU's memory that also stays free (`zerotune advise --headroom`)."""
    runtime_bytes: float = 1.5e9
    """CUDA's context, libraries and NCCL's buffers."""
    logit_bytes: float = 10.0
    """Bytes per logit: 16-bit, fp32 copy, fp32 gradient."""
    compute_spread: float = 0.36
    """Spread of the logarithm of a step's time: nine of ten fitted runs are within it."""
    generation_spread: float = 0.24
    """Spread that is added to it, as a square, on GPUs of a generation without a share of its own: by so much the
    logarithms of Ampere's and Hopper's differ.
    """
    network_spread: float = 0.4
    """Spread of the logarithm of communication time, 90 %; assumed."""
    narrowed: float = 0.25
    """Remaining share of either spread if its time was measured; assumed."""
    comparison_spread: float = 0.16
    """Of the logarithm of two configurations' ratio, 90 %: pairs of the published runs not set aside, of one publisher,
    model and kind of GPU (`python -m benchmarks advise_error`: comparison_error_p90)."""
    overlap_error: float = 0.18
    """Share by which the logarithm of a gain is off, 90 % of gains above 5 %, if only bucket or prefetch differ: on the
    emulated fabrics that are not set aside (measured once, November 2026).
    """
    overlap_floor: float = 0.03
    """Error that is added to it, for small gains: so that on those three fabrics, which are few, 95 % of all gains lie
    in their ranges.
    """

    @property
    def fillable_memory(self) -> float:
        """Share of a GPU's memory that a configuration may take, fragments left out."""
        return self.usable_memory * (1 - self.headroom)


DEFAULT: Final = Constants(matmul_shares={70: 0.76, 80: 0.74, 90: 0.58})
