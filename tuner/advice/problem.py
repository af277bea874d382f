"""What is trained, where and with what: all that a configuration is chosen for."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from zerotune.tuner.advice.configuration import Software, ZeroConfiguration
from zerotune.tuner.advice.constants import Constants
from zerotune.tuner.advice.hardware.cluster import Cluster
from zerotune.tuner.advice.models.model_shape import ModelShape


class Measured(NamedTuple):
    """What was measured, where something was; None: assumed."""

    compute_factor: float | None = None
    """Measured over modelled time of computation."""
    network_factor: float | None = None
    """Measured over modelled time of collectives."""
    network_spread: float = 0.0
    """Of the logarithm of that factor, 90 % of sizes; what is assumed of it is the least that is believed."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A model, a cluster, and what the training script uses."""

    shape: ModelShape
    cluster: Cluster
    software: Software
    constants: Constants
    measured: Measured = Measured()

    def n_groups(self, configuration: ZeroConfiguration) -> int:
        """Ranks, or model-parallel groups, with data of their own."""
        return self.cluster.n_gpus // configuration.n_model_parallel
