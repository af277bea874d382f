"""The problem of choosing a configuration: model, cluster and training script."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from .constants import Constants
from .hardware.clusters import Cluster
from .models.model_shape import ModelShape


class Range(msgspec.Struct, frozen=True):
    """An expected value, and bounds of nine in ten such values."""

    low: float
    expected: float
    high: float

    def inverse(self, numerator: float) -> Range:
        """`numerator` divided by this range, whose bounds change places."""
        return Range(numerator / self.high, numerator / self.expected, numerator / self.low)

    def times(self, factor: float) -> Range:
        """This range, multiplied by a factor."""
        return Range(self.low * factor, self.expected * factor, self.high * factor)


Recompute = Literal["none", "half", "full"]
"""Blocks that keep only their inputs: none, every second, all."""
BUCKET_BYTES: Final = 64 << 20
PAPER_NAMES: Final = {
    (1, False, False): "C1",
    (1, True, False): "C2",
    (2, False, False): "C3",
    (2, True, False): "C4",
    (2, True, True): "C5",
}
"""Table 3 of the ZeRO paper, by stage, P_a and P_a+cpu."""


class ZeroConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration, as in a framework's settings."""

    stage: int
    """0: plain data parallelism."""
    micro_batch: int
    """Sequences that a data-parallel rank (or model-parallel group) computes at a time."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    n_model_parallel: int = 1
    """Ranks that split every block (tensor parallelism)."""
    shard_ranks: int = 0
    """Hybrid sharding: ranks that share one replica of the states; 0: all data-parallel ranks."""
    recompute: Recompute = "none"
    partition_activations: bool = False
    """P_a."""
    offload_activations: bool = False
    """P_a+cpu."""
    bucket_bytes: int | None = BUCKET_BYTES
    """C_B; None: one fp32 buffer as large as the model, as before ZeRO-R."""
    prefetch: int = 1
    """Blocks that stage 3 gathers ahead."""
    overlaps_post_step_gather: bool = False
    """Stages 1 and 2 gather updated parameters beside the next forward."""

    @property
    def paper_name(self) -> str:
        """C1 to C5, or an empty string."""
        if self.bucket_bytes is None or self.recompute != "full":
            return ""
        return PAPER_NAMES.get((self.stage, self.partition_activations, self.offload_activations), "")


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the training script."""

    precision: str = "bf16"
    optimizer: str = "adam"
    flash: bool = True
    """Fused attention."""
    compiled: bool = False
    """Element-wise operations are fused."""


class Measured(NamedTuple):
    """Measured factors; None: assumed."""

    compute_factor: float | None = None
    """Measured over modelled time of computation."""
    network_factor: float | None = None
    """Measured over modelled time of collectives."""
    network_spread: float = 0.0
    """Spread of the logarithm of that factor, 90 % of sizes; the assumed spread is the least."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A model, a cluster, and the settings of the training script."""

    shape: ModelShape
    cluster: Cluster
    software: Software
    constants: Constants
    measured: Measured = Measured()

    def n_groups(self, configuration: ZeroConfiguration) -> int:
        """Number of ranks, or model-parallel groups, with different data."""
        return self.cluster.n_gpus // configuration.n_model_parallel
