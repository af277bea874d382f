"""Small random grids like those that people publish: few sizes, few settings, hardware that nobody described.

A machine has a latency and a bandwidth per setting, a protocol whose cost turns bad at an odd size, and what
socket networks show: plateaus, over which every size takes the same time, and steps. NCCL's own choice changes
from one setting to another at sizes of its own belief.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.lib.data.data_sets import Problem
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

Truth = dict[Candidate, np.ndarray]
RING = tuple(Candidate(Algorithm.ring, protocol) for protocol in Protocol)
TREE = Candidate(Algorithm.tree, Protocol.simple)
PAT = Candidate(Algorithm.pat, Protocol.simple)
COLLECTIVES = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce, Collective.broadcast)
RECORDING_NOISE, PLAYED_NOISE = 0.02, 0.03
PLATEAU_OCTAVES = 4.0


def generated_grid(seed: int) -> list[Problem]:
    """Keys of a random grid."""
    rng = np.random.default_rng([seed, 77])
    collective = COLLECTIVES[rng.integers(len(COLLECTIVES))]
    n_ranks = int(rng.choice([2, 3, 4, 8]))
    place = CommunicatorClass(n_ranks, n_ranks if rng.random() < 0.6 else 1)
    n_sizes, octaves = int(rng.integers(6, 17)), float(rng.choice([1.0, 1.0, 1.0, 2.0]))
    log2_bytes = rng.integers(10, 21) + octaves * np.arange(n_sizes)
    log2_bytes = log2_bytes[log2_bytes <= 30]
    settings = _settings(rng, collective)
    truth = _truth(rng, settings, log2_bytes)
    truth[BASELINE] = _nccls_choice(rng, [truth[one] for one in settings], log2_bytes)
    missing = rng.integers(len(log2_bytes) // 2, len(log2_bytes)) if rng.random() < 0.3 else len(log2_bytes)
    for times in truth.values():  # each was recorded in a run of its own
        times *= np.exp(rng.normal(0, RECORDING_NOISE, len(log2_bytes)))
    problems = []
    for at, size in enumerate(2.0**log2_bytes):
        found = [one for one in settings if one.protocol is not Protocol.ll or at < missing]
        key = DecisionKey(place, collective, Phase.other, size_class(int(size)))
        truth_us = tuple(float(truth[one][at]) for one in (BASELINE, *found))
        problems.append(Problem(key, int(size), (BASELINE, *found), BASELINE, truth_us, PLAYED_NOISE))
    return problems


def _settings(rng: np.random.Generator, collective: Collective) -> list[Candidate]:
    found = [RING[int(Protocol.simple)], RING[int(Protocol.ll)]]
    if rng.random() < 0.4:
        found.append(RING[int(Protocol.ll128)])
    if rng.random() < 0.3:
        if collective is Collective.all_reduce:
            found.append(TREE)
        elif collective is not Collective.broadcast:
            found.append(PAT)
    return found


def _truth(rng: np.random.Generator, settings: list[Candidate], log2_bytes: np.ndarray) -> Truth:
    nbytes = 2.0**log2_bytes
    latency_us, bandwidth_gbs = math.exp(rng.uniform(2.0, 5.5)), math.exp(rng.uniform(-0.5, 5.0))
    start = rng.uniform(log2_bytes[0] - 4, log2_bytes[-1])
    plateau_us = latency_us + 2.0 ** (start + rng.uniform(0, PLATEAU_OCTAVES)) / (1000.0 * bandwidth_gbs)
    plateau = (log2_bytes > start) & (rng.random() < 0.4)
    by_setting = {}
    for one in settings:
        faster_start, slower_rest = _PROTOCOLS[one.protocol or Protocol.simple]
        own = np.exp(rng.normal(0, 0.2, 2))
        rest = slower_rest ** rng.uniform(0.5, 1.5)
        times = latency_us * faster_start * own[0] + nbytes * rest * own[1] / (1000.0 * bandwidth_gbs)
        if one.protocol is not Protocol.ll:
            times = np.where(plateau, np.maximum(times, plateau_us), times)
        if rng.random() < 0.4:  # chunks, buffers: a step at a size of its own
            step = rng.uniform(log2_bytes[0], log2_bytes[-1])
            times = times * np.where(log2_bytes > step, math.exp(rng.normal(0, 0.3)), 1.0)
        by_setting[one] = times
    return by_setting


_PROTOCOLS = {Protocol.ll: (0.55, 3.0), Protocol.ll128: (0.8, 1.15), Protocol.simple: (1.0, 1.0)}
"""Latency and time per byte against Simple's, before random factors."""


def _nccls_choice(rng: np.random.Generator, times_us: list[np.ndarray], log2_bytes: np.ndarray) -> np.ndarray:
    """Times of what NCCL takes: it knows the costs, but each of them wrongly, and changes at wrong sizes."""
    wrong = [times * math.exp(rng.normal(0, 0.3)) for times in times_us]
    shift = int(rng.integers(-2, 3))
    best = np.argmin(np.stack(wrong), axis=0)
    best = best[np.clip(np.arange(len(log2_bytes)) + shift, 0, len(log2_bytes) - 1)]
    taken: np.ndarray = np.stack(times_us)[best, np.arange(len(log2_bytes))]
    return taken
