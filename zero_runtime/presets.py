"""The paper's configurations C1 to C5 (Table 3): which parts of ZeRO-DP and ZeRO-R are on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from zerotune.zero_runtime.errors import SettingsError
from zerotune.zero_runtime.layout.contiguous_buffers import Arena
from zerotune.zero_runtime.settings import Settings
from zerotune.zero_runtime.stages.activations import PartitionedActivations


@dataclass(frozen=True)
class Preset:
    """One row of Table 3; C_B and M_D are on in all of them."""

    stage: int
    partition_activations: bool
    offload_activations: bool

    def settings(self, bucket_bytes: int | None = None) -> Settings:
        """The ZeRO-DP part, with C_B's cap."""
        return Settings(stage=self.stage, bucket_bytes=bucket_bytes)

    def activations(
        self, model_parallel_group: dist.ProcessGroup, arena_bytes: int, device: torch.device | str = "cpu"
    ) -> PartitionedActivations | None:
        """The P_a part, over M_D's buffer.

        Args:
            model_parallel_group: ranks among which each activation checkpoint is divided.
            arena_bytes: of the buffer that holds this rank's shares.
            device: of that buffer; without effect where the row keeps the shares in CPU memory.

        Returns:
            None where the row has no P_a.
        """
        if not self.partition_activations:
            return None
        arena = Arena(arena_bytes, "cpu" if self.offload_activations else device)
        return PartitionedActivations(model_parallel_group, self.offload_activations, arena)


PRESETS = {
    "C1": Preset(stage=1, partition_activations=False, offload_activations=False),
    "C2": Preset(stage=1, partition_activations=True, offload_activations=False),
    "C3": Preset(stage=2, partition_activations=False, offload_activations=False),
    "C4": Preset(stage=2, partition_activations=True, offload_activations=False),
    "C5": Preset(stage=2, partition_activations=True, offload_activations=True),
}


def preset(name: str) -> Preset:
    """C1 to C5.

    Raises:
        SettingsError: there is no such row.
    """
    if name not in PRESETS:
        raise SettingsError(f"preset is {name!r}; it must be one of {', '.join(PRESETS)}")
    return PRESETS[name]
