"""Replayed steps: a program runs as its streams and waits say, is found again in its own log, and can be changed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_programs import GATHER, REDUCE, SCATTER, call, compute, ddp, issue, log_of, wait, zero3
from replay_traces import MIB

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.errors import UserError
from zerotune.store.records import Algorithm, Candidate, Phase, Protocol
from zerotune.tuner.offline.replay import JobChange, replay_table
from zerotune.tuner.offline.replay.table import CollectiveTable
from zerotune.tuner.offline.replay.timeline.program import (
    Program,
    run,
    steady_step,
    undisturbed,
)
from zerotune.tuner.offline.replay.timeline.schedule import StepModel, infer, latest_in_a_row
from zerotune.tuner.offline.replay.timeline.steps import correction, step_facts
from zerotune.tuner.offline.replay.whatif.reshape import stage_of, with_buckets, with_ranks, with_stage


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


def test_two_streams_run_side_by_side():
    calls = (call(Phase.other, REDUCE, 100.0), call(Phase.other, REDUCE, 100.0, stream=1))
    program = Program(calls, (issue(0), issue(1), wait(0), wait(1)))
    assert steady_step(program).step_us == pytest.approx(100)


def test_a_wait_ahead_of_its_issue_is_for_the_step_before():
    program = Program((call(Phase.other, REDUCE, 100.0),), (compute(30.0), wait(0), compute(20.0), issue(0)))
    assert steady_step(program) == pytest.approx((120.0, 70.0))


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


@pytest.mark.parametrize("seed", range(3))
def test_a_stall_that_the_gaps_do_not_show_follows_from_the_time_computed(seed: int):
    """Ranks arrive unevenly: what follows a stall varies as much as what would have been computed beside it."""
    calls = tuple(call(Phase.forward_gather, GATHER, 30.0) for _ in range(6))
    program = Program(calls, tuple(op for at in range(6) for op in (issue(at), wait(at), compute(60.0))))
    table = log_of(program, noise=0.0)
    chance = np.random.default_rng(seed)
    table.rows["start_ns"] += chance.normal(0, 1000, len(table.rows)).astype(np.int64)
    table.duration_us[:] += chance.normal(0, 1.0, len(table.rows))
    found = found_in(table).program
    assert found.compute_us == pytest.approx(program.compute_us, rel=0.1)
    assert steady_step(found, [60.0] * 6).step_us == pytest.approx(steady_step(program, [60.0] * 6).step_us, rel=0.05)


def test_why_a_trace_tells_no_program():
    table = log_of(ddp())
    assert "exposed" in str(infer(replace(table, steps=table.steps[:0])))
    untimed = table.duration_us.copy()
    untimed[:-3] = np.nan
    assert "timed" in str(infer(replace(table, duration_us=untimed)))
    steps = table.steps.copy()
    steps["duration_us"] *= 3
    assert "starts" in str(infer(replace(table, steps=steps)))


def test_steps_unlike_the_usual_one_are_counted_and_left_out():
    table = log_of(zero3())
    rows = table.rows.copy()
    rows["message_bytes"][rows["step"] == 4] += 4096
    model = found_in(replace(table, rows=rows))
    assert (model.n_steps, model.n_other_steps) == (29, 1)


def test_groups_of_other_ranks_do_not_hide_that_steps_are_alike():
    program = ddp()
    table = log_of(program)
    others = table.rows.copy()
    others["comm_id"] = 99
    late_us = np.random.default_rng(5).uniform(-400.0, 400.0, len(others))
    others["start_ns"] += (late_us * 1e3).astype(np.int64)
    both = np.concatenate([table.rows, others])
    order = np.argsort(both["start_ns"], kind="stable")
    joined = replace(
        table,
        rows=both[order],
        duration_us=both["duration_us"][order],
        is_default=np.ones(len(both), bool),
        own_comms=np.unique(table.rows["comm_id"]),
    )
    assert isinstance(infer(replace(joined, own_comms=None)), str)
    model, alone = found_in(joined), found_in(table)
    assert len(model.program.calls) == len(program.calls)
    assert (model.n_steps, model.program) == (alone.n_steps, alone.program)


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


def test_smaller_buckets_move_the_same_bytes():
    split = with_buckets(ddp(), 400_000)
    total = sum(one.shape.message_bytes for one in split.calls)
    assert 6 * MIB <= total < 6 * MIB + 2 * len(split.calls)
    assert len(split.calls) == 16
    with pytest.raises(UserError, match="buckets"):
        with_buckets(ddp(n_buckets=1), MIB // 2)


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


def test_ranks_grow_the_job_and_leave_small_groups():
    program = ddp()
    group = replace(program.calls[0], shape=replace(program.calls[0].shape, n_ranks=1))
    grown = with_ranks(replace(program, calls=(group, *program.calls[1:])), 4096, 512)
    assert [one.shape.n_ranks for one in grown.calls] == [1, 4096, 4096, 4096]
    assert grown.calls[1].shape.message_bytes == program.calls[1].shape.message_bytes


def test_what_if_is_priced_and_says_what_it_assumed():
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


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(UserError, match="99999 ranks"):
        JobChange(n_ranks=99999)
    table = log_of(ddp())
    with pytest.raises(UserError, match="--log-trace"):
        replay_table(replace(table, steps=table.steps[:0]), ["baseline"], change=JobChange(stage=2))
    with pytest.raises(UserError, match="described fabric"):
        replay_table(replace(table, fabric={}), ["baseline"], change=JobChange(n_ranks=8))


# ---- policies that learn -------------------------------------------------------------------------


def test_exploring_is_part_of_a_bandits_cost():
    """One setting is half as slow and one three times: the bandit pays for trying both and ends near the best."""
    table = log_of(ddp(), n_steps=60)
    step = table.rows["step"]
    rows, duration_us = table.rows.copy(), table.duration_us.copy()
    for value, protocol, factor in ((1, Protocol.ll, 0.5), (2, Protocol.ll128, 3.0)):
        rows["protocol"][step % 3 == value] = protocol
        duration_us[step % 3 == value] *= factor
    mixed = replace(table, rows=rows, duration_us=duration_us, is_default=step % 3 == 0)
    names = ["baseline", "oracle", "ucb", "thompson", "tuner"]
    totals = {one.policy: one for one in replay_table(mixed, names).totals}
    assert totals["oracle"].gain_percent == pytest.approx(50, abs=5)
    for name in ("ucb", "thompson"):
        assert 25 < totals[name].gain_percent < totals["oracle"].gain_percent
        assert totals[name].n_refused == 0
    assert totals["tuner"].gain_percent >= -5
    (setting,) = {one.setting for one in replay_table(mixed, ["oracle"]).verdicts}
    assert setting == str(Candidate(Algorithm.ring, Protocol.ll, 8))


@pytest.mark.parametrize("slower", [1, 10, 1000])
def test_exposed_communication_is_no_longer_than_the_step_however_slow_it_gets(slower: int):
    """The program misses its log by a little; that stays a share of each part, not of a step of any length."""
    facts, model = step_facts(log_of(zero3()))
    assert facts is not None
    assert model is not None
    facts = msgspec.structs.replace(facts, step_us=1.02 * facts.step_us, exposed_us=1.05 * facts.exposed_us)
    corrected = correction(model.program, facts)
    step = steady_step(model.program, [slower * one.logged_us for one in model.program.calls])
    found = corrected(step)
    assert 0 <= found.exposed_us <= found.step_us
    compute_us = facts.step_us - facts.exposed_us
    assert found.step_us - found.exposed_us == pytest.approx(compute_us, rel=0.02)


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 12))
def test_the_program_is_made_of_the_latest_steps_in_a_row(numbers: set[int], n_wanted: int) -> None:
    """A job's first steps ran before anything was tuned."""
    found = latest_in_a_row([*numbers], n_wanted)
    assert found == [*range(found[0], found[0] + len(found))]
    assert {*found} <= numbers
    runs = [
        [*range(last - length + 1, last + 1)]
        for last in numbers
        for length in range(1, n_wanted + 1)
        if {*range(last - length + 1, last + 1)} <= numbers
    ]
    longest = max(map(len, runs))
    assert len(found) == longest
    assert found[-1] == max(run[-1] for run in runs if len(run) == longest)
