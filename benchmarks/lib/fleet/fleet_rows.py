"""Measurements as ranks make them, for tests of data that nodes share."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from zerotune.store.records import Collective, Phase, TimingSource
from zerotune.store.sqlite.rows.measurements import MEASUREMENT

if TYPE_CHECKING:
    from zerotune.tuner.fleet.signing import Signer

FACTS: dict[str, str | int | float | bool] = {"nccl_version": 22809, "gpu": "H100", "n_nodes": 2}


def measured(n_steps: int = 4, *, faster: float = 0.1, level: float = 0.0, seed: int = 0) -> npt.NDArray[np.void]:
    """One job's gathers of two sizes: NCCL's own choice, and ring/ll128 in every other step."""
    block = np.zeros(2 * n_steps, MEASUREMENT)
    block["n_ranks"], block["n_nodes"] = 16, 2
    block["collective"], block["phase"] = Collective.all_gather, Phase.forward_gather
    block["message_bytes"] = np.tile([1 << 20, 1 << 24], n_steps)
    block["step"] = np.repeat(np.arange(n_steps), 2)
    block["is_default"] = block["step"] % 2 == 0
    block["algorithm"], block["n_channels"] = 1, 8
    block["protocol"] = np.where(block["is_default"], 2, 1)
    block["timing_source"] = TimingSource.gpu_kernel
    logs = np.log(block["message_bytes"] / 1e4) + level - np.where(block["is_default"], 0.0, faster)
    block["duration_us"] = np.exp(logs + np.random.default_rng(seed).normal(0.0, 0.01, len(block)))
    return block


def signer_of(name: str) -> Signer:
    """The key of a node: the same one for the same name."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from zerotune.tuner.fleet.signing import Signer

    return Signer(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))
