"""The timeline of one step: what was waited for is marked, and adds up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zerotune.store.records import Collective, Phase
from zerotune.store.trace_format import STEP_FIELDS
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.advice.prediction.timeline import Op, OpKind, Program
from zerotune.tuner.offline.replay.schedule import StepModel
from zerotune.tuner.offline.replay.table import CollectiveTable, Shape
from zerotune.tuner.offline.replay.usual_steps import TimelineCall
from zerotune.tuner.offline.report.step_timeline import lanes_of, played, timelines

GATHER = Shape(2, 2, Collective.all_gather, Phase.forward_gather, 1 << 20)
SCATTER = Shape(2, 2, Collective.reduce_scatter, Phase.gradient_scatter, 1 << 20)


def model(ops: list[Op]) -> StepModel:
    program = Program((TimelineCall(0, 100.0, shape=GATHER), TimelineCall(1, 50.0, shape=SCATTER)), tuple(ops))
    return StepModel(program, {}, 8, 0, 160.0, 60.0, 0.4)


def test_exposed_time_and_computation_add_up_to_a_step():
    step = played(
        "x",
        model(
            [
                Op(OpKind.issue, 0),
                Op(OpKind.compute, us=40),
                Op(OpKind.wait, 0),
                Op(OpKind.issue, 1),
                Op(OpKind.compute, us=60),
                Op(OpKind.wait, 1),
            ]
        ),
    )
    assert step.step_us == 160
    assert step.exposed == [("forward_gather", 40.0, 100.0)], "the scatter is hidden"
    assert step.exposed_us + sum(end - start for start, end in step.computation) == step.step_us
    assert step.communication == [("forward_gather", 0.0, 100.0), ("gradient_scatter", 100.0, 150.0)]
    assert lanes_of([step]) == ["forward_gather", "gradient_scatter"]


def table(exposed_us: float) -> CollectiveTable:
    """40 steps of one gather: 100 us of computation, then 200 us that are waited for, 100 under a plan from step 20."""
    steps = np.zeros(40, STEP_FIELDS)
    rows = np.zeros(40, OBSERVATION_FIELDS)
    durations = np.where(np.arange(40) < 20, 200.0, 100.0)
    starts = np.cumsum([0, *(100 + durations[:-1])]) + 100
    steps["step"], steps["epoch"] = np.arange(40), np.arange(40) >= 20
    steps["duration_us"], steps["exposed_us"] = 100 + durations, durations if exposed_us else np.nan
    rows["step"], rows["start_ns"], rows["sequence"] = np.arange(40), 1000 * starts, np.arange(40)
    rows["message_bytes"], rows["n_ranks"], rows["n_nodes"], rows["collective"] = 1 << 20, 2, 2, 2
    return CollectiveTable(rows, durations.astype(np.float32), np.ones(40, bool), steps)


def test_a_trace_gives_its_end_and_two_give_before_and_after():
    (settled,) = timelines([table(1.0)])
    assert "NCCL" not in settled.label
    assert settled.exposed_us == pytest.approx(100, rel=0.02)
    assert settled.step_us == pytest.approx(200, rel=0.02)
    two = timelines([table(1.0), replace(table(1.0), job_id="second")])
    assert [one.exposed_us for one in two] == [settled.exposed_us] * 2


def test_a_trace_without_any_plan_has_no_after():
    whole = table(1.0)
    steps = whole.steps.copy()
    steps["epoch"] = 0
    (own,) = timelines([replace(whole, steps=steps)])
    assert "NCCL" in own.label


