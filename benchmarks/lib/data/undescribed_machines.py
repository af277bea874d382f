"""Sweeps of machines that nobody described.

By algorithm and protocol a machine has a random latency, which grows with the ranks, and a random bandwidth. The
bandwidth saturates, or falls again, over channels. NCCL's own choice is the ring, with a protocol by size. A call with
little traffic fills only some of the requested channels (`cost_model.channels_used`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from benchmarks.lib.data.data_sets import KINDS, DataSet, problems_of
from zerotune.agent.nccl.cost_model import channels_used
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
    size_class,
)

SETTINGS = (
    (Algorithm.ring, Protocol.ll),
    (Algorithm.ring, Protocol.ll128),
    (Algorithm.ring, Protocol.simple),
    (Algorithm.pat, Protocol.simple),
    (Algorithm.nvls, Protocol.simple),
)
CHANNELS = (1, 2, 4, 8, 16, 24, 32)
SIZES = tuple(1 << exponent for exponent in range(12, 29))
RANKS_PER_NODE = 8

Truth = dict[tuple[Algorithm, Protocol], tuple[float, float, float, float, float]]


def truth(rng: np.random.Generator) -> Truth:
    """A machine's random truth by setting.

    Each is (latency of a hop in us, latency of the rest in us, bytes per us of the full bandwidth, channels that reach
    it, share of it that each further channel costs).
    """
    found: Truth = {}
    for algorithm, protocol in SETTINGS:
        per_hop_us = {Protocol.ll: 0.8, Protocol.ll128: 1.1, Protocol.simple: 2.0}[protocol] * rng.uniform(0.6, 1.8)
        share = {Protocol.ll: 0.3, Protocol.ll128: 0.9, Protocol.simple: 1.0}[protocol]
        found[algorithm, protocol] = (
            float(per_hop_us),
            float(rng.uniform(8.0, 25.0)),
            float(share * rng.uniform(40e3, 100e3)),
            float(rng.uniform(4.0, 24.0)),
            float(rng.choice([0.0, 0.004, 0.012])),
        )
    return found


def duration_us(
    known: Truth, kind: Collective, setting: tuple[Algorithm, Protocol], n_ranks: int, nbytes: int, asked: int
) -> float:
    """The duration of a call on this machine, without noise.

    Args:
        known: the machine, see `truth`.
        nbytes: NCCL's nBytes, the whole buffer.
        asked: channels that are asked for; with little traffic fewer run.
    """
    per_hop_us, rest_us, bytes_per_us, filled_by, too_many = known[setting]
    n_hops = n_ranks - 1 if setting[0] is Algorithm.ring else np.log2(n_ranks)
    n_channels = max(1, int(channels_used(kind, setting[1], nbytes, asked)))
    reached = min(1.0, (n_channels / filled_by) ** 0.7) * (1.0 - too_many * max(0.0, n_channels - filled_by))
    return float(rest_us + n_hops * per_hop_us + 0.1 * n_channels + nbytes / (bytes_per_us * reached))


def nccls_choice(nbytes: int) -> tuple[Algorithm, Protocol]:
    """The ring, with a protocol by size."""
    if nbytes < 32 << 10:
        return Algorithm.ring, Protocol.ll
    return Algorithm.ring, Protocol.ll128 if nbytes < 4 << 20 else Protocol.simple


def undescribed_machine(seed: int, noise: float, node_counts: Sequence[int]) -> DataSet:
    """One machine's sweep.

    Args:
        noise: of one call, standard deviation of its logarithm.
        node_counts: nodes that each size is measured on, with eight ranks each.
    """
    rng = np.random.default_rng([seed, 41])
    found: dict[tuple[DecisionKey, int], dict[Candidate, list[float]]] = {}
    for kind in KINDS:
        known = truth(rng)
        for n_nodes, nbytes in itertools.product(node_counts, SIZES):
            place = CommunicatorClass(n_nodes * RANKS_PER_NODE, n_nodes)
            times_us = found[DecisionKey(place, kind, Phase.other, size_class(nbytes)), nbytes] = {}
            asked = [(Candidate(*cell, count), cell) for cell in SETTINGS for count in CHANNELS]
            for candidate, cell in [*asked, (BASELINE, nccls_choice(nbytes))]:
                count = candidate.n_channels or CHANNELS[-1]
                us = duration_us(known, kind, cell, place.n_ranks, nbytes, count) * np.exp(rng.normal(0.0, noise))
                times_us[candidate] = [us]
    return DataSet(f"machine_{seed}", problems_of(found), {})
