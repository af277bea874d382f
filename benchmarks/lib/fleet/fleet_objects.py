"""Objects below a URL as a fleet would have written them, made from a seed."""

from __future__ import annotations

from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.lib.fleet.fleet_rows import signer_of
from zerotune.store.records import Algorithm, Collective, Outcome, Phase, Protocol, Source, TimingSource
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.fleet.objects import Fabric, Packed, pack

ROWS_PER_OBJECT: Final = 200_000
"""As many as a daemon writes at once."""
CALLS_PER_STEP: Final = 4
"""Of each key."""
AT_S: Final = 1_800_000_000
NOISE: Final = 0.03
FABRICS: Final = tuple(
    Fabric(f"fabric{at}", {"nccl_version": 22809, "gpu": "H100", "n_ranks_per_node": 8, "n_nodes": n_nodes})
    for at, n_nodes in enumerate((2, 4, 8, 16))
)
KEYS: Final = tuple(
    product(
        (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.all_gather, Phase.backward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        ),
        (1 << 18, 1 << 21, 1 << 24, 1 << 27),
    )
)
SETTINGS: Final = (
    (Algorithm.ring, Protocol.simple, 16),
    (Algorithm.ring, Protocol.simple, 8),
    (Algorithm.ring, Protocol.ll128, 16),
    (Algorithm.ring, Protocol.ll128, 8),
    (Algorithm.ring, Protocol.ll, 16),
    (Algorithm.ring, Protocol.ll, 8),
)
"""The first is NCCL's own choice."""


def gains() -> npt.NDArray[np.float64]:
    """By how much (log) each setting is faster than NCCL's own choice; shape (n_fabrics, n_keys, n_settings)."""
    every = np.tile([-0.5, -0.2, -0.1, 0.05, 0.1, 0.2], (len(FABRICS), len(KEYS), 1))
    drawn = np.random.default_rng(7).permuted(every, axis=2)
    drawn[:, ::4] = -np.abs(drawn[:, ::4])  # at some keys nothing beats NCCL
    drawn[:, :, 0] = 0.0
    return drawn


def object_of(at: int, n_rows: int = ROWS_PER_OBJECT) -> Packed:
    """The object of the node with this number. Networks are faster or slower by 10 % from job to job."""
    fabric = at % len(FABRICS)
    block = _rows(n_rows, gains()[fabric], FABRICS[fabric], at)
    name, job = f"node{at}", np.zeros(n_rows, np.int64)
    return pack(name, FABRICS[fabric], [f"job{at}"], job, block, AT_S + 60 * at, signer_of(name))


def _rows(n: int, gain: npt.NDArray[np.float64], fabric: Fabric, seed: int) -> npt.NDArray[np.void]:
    random = np.random.default_rng(seed)
    call = np.arange(n)
    key, step = call // CALLS_PER_STEP % len(KEYS), call // (CALLS_PER_STEP * len(KEYS))
    n_steps = int(step[-1]) + 1
    # Half of the steps run NCCL's own choice, the others a trial, at each key by itself.
    trial = random.integers(0, len(SETTINGS), (n_steps, len(KEYS)))
    setting = np.where(random.random((n_steps, len(KEYS))) < 0.5, 0, trial)[step, key]
    block = np.zeros(n, MEASUREMENT)
    n_nodes = int(fabric.facts["n_nodes"])
    block["n_ranks"], block["n_nodes"], block["step"] = 8 * n_nodes, n_nodes, step
    block["source"], block["outcome"], block["timing_source"] = Source.live, Outcome.ok, TimingSource.gpu_kernel
    named = np.array([(*of, n_bytes) for of, n_bytes in KEYS], np.int64)
    for name, column in zip(("collective", "phase", "message_bytes"), named.T, strict=True):
        block[name] = column[key]
    for name, column in zip(("algorithm", "protocol", "n_channels"), np.array(SETTINGS, np.int64).T, strict=True):
        block[name] = column[setting]
    block["is_default"] = setting == 0
    usual = 3.0 + np.log(named[key, 2] / 2**18 + 1.0) + random.normal(0.0, 0.1)
    block["duration_us"] = np.exp(usual - gain[key, setting] + random.normal(0.0, NOISE, n))
    return block
