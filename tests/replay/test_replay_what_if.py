"""What-if answers: what changes nothing, jobs that were tuned while they were logged, and honest levels."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replay_programs import ddp, log_of, zero3
from replay_traces import MIB, records, write_trace

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.records import Protocol
from zerotune.tuner import cli
from zerotune.tuner.advice.prediction.timeline import Program, steady_step
from zerotune.tuner.offline.replay import JobChange, replay_table
from zerotune.tuner.offline.replay.result import WhatIf
from zerotune.tuner.offline.replay.table import CollectiveTable

N_UNTUNED = 10


def tuned_log(program: Program, factor: float = 0.6, seed: int = 3) -> CollectiveTable:
    """A job whose collectives took `factor` of their time from its eleventh step on, under another protocol."""
    faster = replace(program, calls=tuple(replace(one, logged_us=one.logged_us * factor) for one in program.calls))
    early = log_of(program, n_steps=N_UNTUNED, noise=0.02, seed=seed)
    late = log_of(faster, n_steps=60, noise=0.02)
    late.rows["protocol"] = Protocol.ll128
    late.rows["sequence"] += len(early.rows)
    late.rows["start_ns"] += int(early.steps["duration_us"].sum() * 1e3)
    for numbered in (late.rows, late.steps):
        numbered["step"] += N_UNTUNED
    return replace(
        early,
        rows=np.concatenate([early.rows, late.rows]),
        duration_us=np.concatenate([early.duration_us, late.duration_us]),
        is_default=np.concatenate([early.is_default, ~late.is_default]),
        steps=np.concatenate([early.steps, late.steps]),
    )


def answered(table: CollectiveTable, change: JobChange) -> WhatIf:
    answer = replay_table(table, ["baseline"], change=change).what_if
    assert answer is not None
    return answer


# ---- the level -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("program", [zero3(600.0, 600.0), zero3(), ddp()], ids=["exposed", "half hidden", "ddp"])
def test_both_levels_of_a_tuned_job_are_predicted(program: Program, seed: int):
    """NCCL's own choice ran in the first steps only, the rest of the log is faster: each level is its own steps'."""
    estimates = replay_table(tuned_log(program, seed=seed), ["baseline", "oracle"]).step_estimates
    truths_us = [
        steady_step(program, [one.logged_us * factor for one in program.calls]).step_us for factor in (1.0, 0.6)
    ]
    for estimate, truth_us in zip(estimates, truths_us, strict=True):
        assert estimate.low_us <= truth_us <= estimate.high_us
        assert estimate.high_us / estimate.low_us < 1.12


# ---- no change -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        JobChange(n_ranks=2),
        JobChange(fabric=fabrics.load("ethernet_boxes")),
        JobChange(stage=3),
        JobChange(bucket_bytes=MIB),
        JobChange(bucket_bytes=round(1.05e6)),
        JobChange(n_ranks=2, fabric=fabrics.load("ethernet_boxes"), stage=3),
    ],
    ids=str,
)
def test_asking_for_the_job_as_it_is_changes_nothing(change: JobChange):
    table = tuned_log(zero3(600.0, 600.0))
    plain = replay_table(table, ["baseline", "oracle"], change=change)
    assert plain.what_if is not None
    assert len(plain.what_if.assumptions) == 1
    for one, other in zip(plain.what_if.step_estimates, plain.step_estimates, strict=True):
        assert one.step_us == pytest.approx(other.step_us, rel=1e-9)
        assert one.exposed_us == pytest.approx(other.exposed_us, rel=1e-6)
        assert one.low_us == pytest.approx(other.low_us, rel=0.01)
        assert one.high_us == pytest.approx(other.high_us, rel=0.01)


# ---- tuned while logged --------------------------------------------------------------------------


@pytest.mark.parametrize("change", [JobChange(stage=2), JobChange(bucket_bytes=2 * MIB), JobChange(n_ranks=4)], ids=str)
def test_a_changed_job_is_predicted_the_same_from_a_tuned_log(change: JobChange):
    """The baseline is NCCL's own choice, whatever ran while the job was logged."""
    program = zero3(600.0, 600.0)
    untuned, tuned = (answered(table, change).step_estimates[0] for table in (log_of(program), tuned_log(program)))
    assert tuned.step_us == pytest.approx(untuned.step_us, rel=0.03)


def test_calls_without_a_price_are_refused_and_not_free():
    table = replace(log_of(ddp()), fabric={}, fabric_id="")
    answer = answered(table, JobChange(bucket_bytes=3 * MIB))
    assert not answer.step_estimates
    assert answer.step_refusals[0].refused_share_percent == pytest.approx(100)


# ---- what was named by hand ----------------------------------------------------------------------


def test_a_named_store_must_exist(tmp_path: Path, monkeypatch, capsys):
    write_trace(tmp_path, records(4, 50.0))
    monkeypatch.setattr(sys, "argv", ["zerotune", "replay", str(tmp_path), "--store", str(tmp_path / "nosuch.db")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert str(tmp_path / "nosuch.db") in captured.err
    assert not captured.out
