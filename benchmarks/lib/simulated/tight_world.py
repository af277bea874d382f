"""A job on a device whose memory NCCL shares with training."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.lib.simulated.brain_world import World
from zerotune.store.records import Algorithm, StepRecord


class OutOfMemory(Exception):
    """The device is out of memory."""


@dataclass
class TightWorld(World):
    """Connections are made at first use, as NCCL makes them."""

    free_mb: float = float("inf")
    connects: str = "all_channels"
    connected: dict[Algorithm, int] = field(default_factory=dict)

    def run_step(self) -> tuple[np.ndarray, StepRecord]:
        for call in self.calls:
            ran = self.truth(call, self.chosen(call))[1]
            assert ran.algorithm is not None
            n_channels = self.topology.comm_channels if self.connects == "all_channels" else ran.n_channels
            if n_channels > self.connected.get(ran.algorithm, 0):
                self.connected[ran.algorithm] = n_channels
                if self.taken_mb > self.free_mb:
                    raise OutOfMemory(f"{ran} for {call}")
        used_mb = self.fabric.memory.device_mb - self.free_mb + self.taken_mb
        self.memory_pressure = max(0.0, used_mb / self.fabric.memory.device_mb)
        return super().run_step()

    @property
    def taken_mb(self) -> float:
        return self.fabric.memory_mb(self.communicator, self.connected)
