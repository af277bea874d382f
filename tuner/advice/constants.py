"""What datasheets do not tell. `python -m benchmarks advise_error --fit` found what is marked as fitted.

It saw the published runs that are not set aside (benchmarks/advice/published_runs.py), and none of the ZeRO paper's.
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
    """A matrix so wide reaches half of that. A tile's width."""
    attention_share: float = 0.61
    """Of a large multiplication's rate that fused attention reaches, counting what a causal mask leaves out. Fitted."""
    traffic: float = 3.0
    """Bytes that move for each byte of activations that a block keeps, forward; backward twice as many. Fitted."""
    compiled_traffic: float = 0.6
    """Share of it that is left under a compiler; assumed: torch.compile makes steps some 15 % faster."""
    network_share: float = 0.73
    """Of NCCL's own predicted bandwidth that training gets. Fitted."""
    contention: float = 0.48
    """Of each second in which the network works beside computation: what computation loses. Fitted."""
    launch_s: float = 4e-6
    """CPU time per kernel, below which a GPU waits for the next."""
    kernels_per_block: int = 30
    """Forward, without a compiler; backward twice as many."""
    optimizer_bytes: float = 38.0
    """That an optimizer step moves per parameter: four fp32 values read, three written, the 16-bit copy, the norm."""
    usable_memory: float = 0.91
    """Of a GPU's memory; the rest is lost to fragments (ZeRO paper, section 3.2: up to 30 % without M_D)."""
    headroom: float = 0.0
    """Share of a GPU's memory that is left free beside that; `zerotune advise` takes HEADROOM."""
    runtime_bytes: float = 1.5e9
    """CUDA's context, libraries and NCCL's buffers."""
    logit_bytes: float = 10.0
    """Per logit: 16-bit, fp32 copy, fp32 gradient."""
    compute_spread: float = 0.36
    """Of the logarithm of a step's time: nine of ten runs that constants were fitted to are no further off."""
    generation_spread: float = 0.24
    """What is added to it, as a square, on GPUs of a generation without a share of its own: by so much the logarithms
    of Ampere's and Hopper's differ."""
    network_spread: float = 0.4
    """Of the logarithm of the time of communication, 90 %; assumed."""
    narrowed: float = 0.25
    """What is left of either spread where it was measured; assumed."""
    comparison_spread: float = 0.16
    """Of the logarithm of two configurations' ratio, 90 %: pairs of the published runs not set aside, of one publisher,
    model and kind of GPU (`python -m benchmarks advise_error`: comparison_error_p90)."""
    overlap_error: float = 0.18
    """Share by which the logarithm of a gain is off, 90 % of gains above 5 %, where only bucket or prefetch differ: on
    the emulated fabrics that are not set aside (measured once, November 2026)."""
    overlap_floor: float = 0.03
    """What is added to it, for small gains: so that on those three fabrics, which are few, 95 % of all gains lie in
    their ranges."""

    @property
    def fillable_memory(self) -> float:
        """Share of a GPU's memory that a configuration may take, fragments left out."""
        return self.usable_memory * (1 - self.headroom)


HEADROOM: Final = 0.08
"""A caching allocator retries and slows down before memory is full."""
DEFAULT: Final = Constants(matmul_shares={70: 0.76, 80: 0.74, 90: 0.58})
