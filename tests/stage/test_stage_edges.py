"""Sequences that a profiler's window cuts, or of which it shows a part."""

from __future__ import annotations

import numpy as np
import pytest

from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.fingerprint import StageFingerprint

GATHER, SCATTER, REDUCE = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
ACTIVATION, MODEL = 64 << 20, 900 << 20
N_BLOCKS = 12


def megatron_micro_step() -> list[tuple[int, int]]:
    """Tensor and sequence parallelism: two gathers and scatters per block, in backward each gather twice."""
    forward = [(GATHER, ACTIVATION), (SCATTER, ACTIVATION)] * 2 * N_BLOCKS
    return forward + [(GATHER, ACTIVATION), (GATHER, ACTIVATION), (SCATTER, ACTIVATION)] * 2 * N_BLOCKS


def shown(calls: list[tuple[int, int]]) -> set[Stage]:
    fingerprint, seen = StageFingerprint(), set()
    for at in range(0, len(calls), 16):
        collectives, sizes = (np.array(column, np.int64) for column in zip(*calls[at : at + 16], strict=True))
        fingerprint.add(collectives, sizes, np.zeros(len(sizes)))
        seen.add(fingerprint.stage)
    return seen


@pytest.mark.parametrize("n_micro", [1, 4])
def test_sequence_parallelism_is_no_step(n_micro: int):
    """Neither a block's backward nor a micro-step, in which nothing but activations moves, passes for ZeRO-3."""
    step = [*megatron_micro_step() * n_micro, (SCATTER, MODEL), (GATHER, MODEL)]
    for n_cut in (0, 20, 40):
        calls = (step * 4)[n_cut:]
        assert Stage.zero3 not in shown(calls), n_cut
        assert Stage.zero1_or_2 in shown(calls)
