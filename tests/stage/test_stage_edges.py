"""Sequences that a profiler's window cuts, or of which it shows a part."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.records import Collective, Stage
from zerotune.tuner.fingerprint.fingerprint import StageFingerprint
from zerotune.tuner.offline.stage_command import read
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.left_out import LeftOut

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


def ddp_trace(path: Path, n_before: int, n_within: int) -> Path:
    """Five buckets a step; the first kernels were launched before the profiler's window."""
    events = []
    for at in range(30):
        kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "tid": 20, "dur": 90.0}
        kernel |= {"ts": 1000.0 * at + 500, "args": {"correlation": at + 1, "External id": at + 1, "grid": [8, 1, 1]}}
        events.append(kernel)
        if at < n_before:
            continue
        launch = {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernelExC",
            "tid": 1,
            "ts": 1000.0 * at,
            "dur": 5.0,
        }
        events.append(launch | {"args": {"correlation": at + 1, "External id": at + 1}})
        if at >= 30 - n_within:
            continue
        told = {"Collective name": "allreduce", "In msg nelems": 1 << 20 << at % 5, "Out msg nelems": 1 << 20 << at % 5}
        told |= {"dtype": "Float", "Group size": 8, "External id": at + 1}
        call = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "tid": 1, "ts": 1000.0 * at - 2, "dur": 9.0}
        events.append(call | {"args": told})
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": events}))
    return path


@pytest.mark.parametrize(
    ("n_before", "n_within", "stage"), [(0, 0, Stage.ddp), (2, 0, Stage.ddp), (0, 2, Stage.unknown)]
)
def test_steps_cut_at_the_edge_are_left_out_and_the_others_speak(tmp_path, n_before, n_within, stage):
    path = ddp_trace(tmp_path / "trace.json", n_before, n_within)
    assert read(path).shown.stage is stage
    trace = read_trace(path)
    list(trace.blocks())
    assert trace.summary.unusable[LeftOut.before_window] == n_before
