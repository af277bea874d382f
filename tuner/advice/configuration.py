"""One way to train a model on a cluster."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Recompute = Literal["none", "half", "full"]
"""Which blocks keep their inputs alone: none, every second, all."""
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
    """Everything that a user would write into a framework's settings."""

    stage: int
    """0: plain data parallelism."""
    micro_batch: int
    """Sequences that a data-parallel rank computes at a time; of a model-parallel group, where there is one."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    n_model_parallel: int = 1
    """Ranks that split every block (tensor parallelism)."""
    shard_ranks: int = 0
    """Hybrid sharding: ranks that share the states, of which replicas exist; 0: all data-parallel ranks."""
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
    """What the training script uses."""

    precision: str = "bf16"
    optimizer: str = "adam"
    flash: bool = True
    """Fused attention."""
    compiled: bool = False
    """Element-wise operations are fused."""
