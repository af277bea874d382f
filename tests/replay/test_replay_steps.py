"""Replayed steps: a program runs as its streams and waits say, is found again in its own log, and can be changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from replay_programs import GATHER, REDUCE, SCATTER, call, compute, ddp, issue, log_of, wait, zero3
from replay_traces import MIB

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.errors import UserError
from zerotune.store.records import Phase, Protocol
from zerotune.tuner.advice.prediction.timeline import Program, run, steady_step, undisturbed
from zerotune.tuner.offline.replay import JobChange, replay_table
from zerotune.tuner.offline.replay.reshape import stage_of, with_buckets, with_stage
from zerotune.tuner.offline.replay.schedule import StepModel, infer
from zerotune.tuner.offline.replay.table import CollectiveTable


def found_in(table: CollectiveTable) -> StepModel:
    model = infer(table)
    assert isinstance(model, StepModel), model
    return model


# ---- programs ------------------------------------------------------------------------------------


def test_a_stream_queues_and_a_wait_exposes():
    program = Program(
        (call(Phase.other, REDUCE, 100.0), call(Phase.other, REDUCE, 50.0)),
        (issue(0), issue(1), compute(120.0), wait(1), compute(10.0)),
    )
    first = run(program, [[100.0, 50.0]])[0]
    assert first.starts_us == (0.0, 100.0)
    assert first.exposed_us == pytest.approx(30)
    assert first.end_us == pytest.approx(160)
    assert steady_step(program) == pytest.approx((160.0, 30.0))


def test_channels_slow_the_computation_beside_them():
    program = Program((call(Phase.other, REDUCE, 100.0),), (issue(0), compute(200.0), wait(0)))
    slowed = replace(program, slowdown=lambda n_channels: 1 + n_channels / 8)
    assert steady_step(slowed).step_us == pytest.approx(250), "100 us at half speed do 50 us of work"
    assert steady_step(slowed, channels=[0]).step_us == pytest.approx(200)
    alone = undisturbed(replace(program, ops=(issue(0), compute(250.0), wait(0))), lambda n: 1 + n / 8)
    assert alone.compute_us == pytest.approx(200)
    assert steady_step(alone).step_us == pytest.approx(250)


# ---- found again in the log ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [ddp(), ddp(100.0), zero3(), zero3(60.0, 60.0), zero3(400.0, 300.0), zero3(150.0, 500.0)],
    ids=["ddp", "ddp-hidden", "zero3", "zero3-hidden", "zero3-bound", "zero3-scatters-bound"],
)
def test_a_program_is_found_in_its_log(program: Program):
    """The gaps, the waits and their sum: the step is predicted for durations that were never logged."""
    model = found_in(log_of(program))
    assert model.error_percent < 1.5
    truth, found = steady_step(program), steady_step(model.program)
    assert found.step_us == pytest.approx(truth.step_us, rel=0.02)
    for factor in (0.7, 1.5):
        durations = [one.logged_us * factor for one in program.calls]
        truth = steady_step(program, durations)
        assert steady_step(model.program, durations).step_us == pytest.approx(truth.step_us, rel=0.05), factor


def test_hidden_gains_nothing_and_exposed_gains_all():
    """Two logs of one communication time: the plan's gain differs, as what computation hides differs."""
    changes = {}
    for name, program in (("hidden", ddp(60.0)), ("exposed", zero3(600.0, 600.0))):
        table = log_of(program)
        table.rows["protocol"][table.rows["step"] % 3 == 0] = Protocol.ll
        halved = table.duration_us.copy()
        halved[table.rows["step"] % 3 == 0] /= 2
        tuned = table.is_default & (table.rows["step"] % 3 != 0)
        mixed = replace(table, duration_us=halved, is_default=tuned)
        result = replay_table(mixed, ["baseline", "oracle"])
        changes[name] = [one.change_percent for one in result.step_estimates]
    assert changes["hidden"][0] == changes["exposed"][0] == 0
    assert changes["hidden"][1] == pytest.approx(-2.0, abs=2.5), "the tail of the last bucket alone"
    assert changes["exposed"][1] < -35


# ---- what if -------------------------------------------------------------------------------------


def test_larger_buckets_are_fewer_and_later():
    program = ddp()
    merged = with_buckets(program, 3 * MIB)
    assert [one.shape.message_bytes for one in merged.calls] == [3 * MIB, 3 * MIB]
    assert merged.compute_us == pytest.approx(program.compute_us)
    priced = replace(merged, calls=tuple(replace(one, logged_us=300.0) for one in merged.calls))
    starts = run(priced, [[300.0, 300.0]])[0].starts_us
    assert starts == pytest.approx((1200.0, 1600.0)), "with the last byte of the second and the fourth old bucket"


def test_stages_issue_what_they_must():
    program = zero3()
    two = with_stage(program, 2)
    assert [stage_of(one) for one in (program, two, with_stage(program, 0))] == [3, 2, 0]
    kinds = [(one.shape.collective, one.shape.phase) for one in two.calls]
    assert kinds.count((GATHER, Phase.post_step_gather)) == 4
    assert kinds.count((SCATTER, Phase.gradient_scatter)) == 4
    assert len(kinds) == 8
    back = with_stage(two, 3)
    phases = [one.shape.phase for one in back.calls]
    counts = {phase: phases.count(phase) for phase in phases}
    # The unit that ends the forward pass is still there when the backward pass begins.
    assert counts == {Phase.forward_gather: 4, Phase.backward_gather: 3, Phase.gradient_scatter: 4}
    assert {one.shape.collective for one in with_stage(program, 0).calls} == {REDUCE}
    for changed in (two, back):
        assert changed.compute_us == pytest.approx(program.compute_us)
    with pytest.raises(UserError, match="no ZeRO stage 5"):
        with_stage(program, 5)


def test_a_changed_job_is_priced_with_its_assumptions():
    table = log_of(zero3(600.0, 600.0))
    same = replay_table(table, ["baseline"], change=JobChange(bucket_bytes=2 * MIB)).what_if
    assert same is not None
    assert same.n_collectives == 8 + 2
    assert same.totals[0].n_by_evidence["predicted"] == 2
    assert same.totals[0].n_by_evidence["measured_here"] == 8
    larger = replay_table(table, ["baseline", "model"], change=JobChange(n_ranks=16384)).what_if
    assert larger is not None
    assert larger.step_estimates[0].step_us > 3 * larger.logged_step_us
    assert len(larger.assumptions) > len(same.assumptions)
    elsewhere = replay_table(table, ["baseline"], change=JobChange(fabric=fabrics.load("h100_ib_16"))).what_if
    assert elsewhere is not None
    assert elsewhere.step_estimates[0].step_us < elsewhere.logged_step_us
    assert any("another fabric" in one for one in elsewhere.assumptions)


def test_questions_without_the_needed_records_are_refused():
    with pytest.raises(UserError, match="99999 ranks"):
        JobChange(n_ranks=99999)
    table = log_of(ddp())
    with pytest.raises(UserError, match="--log-trace"):
        replay_table(replace(table, steps=table.steps[:0]), ["baseline"], change=JobChange(stage=2))
    with pytest.raises(UserError, match="described fabric"):
        replay_table(replace(table, fabric={}), ["baseline"], change=JobChange(n_ranks=8))
