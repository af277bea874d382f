"""Replay: sums of medians where there is evidence, refusal where there is none, intervals that are honest."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replay_traces import FABRIC, MIB, RING_LL_4, RING_SIMPLE_8, records, table_of, verdict_of, write_trace
from rich.console import Console

from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.errors import TraceError, UserError
from zerotune.store.records import (
    Algorithm,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    PlanRow,
    Protocol,
    StepRecord,
    size_class,
)
from zerotune.tuner.offline.replay import policies, render, replay, replay_table
from zerotune.tuner.offline.replay.engine import judge
from zerotune.tuner.offline.replay.estimates import CostEstimates, Grade
from zerotune.tuner.offline.replay.loading import load_table
from zerotune.tuner.offline.replay.oracle_facts import CheaperPolicy, OracleFacts, oracle_facts
from zerotune.tuner.offline.replay.policies import PolicyContext
from zerotune.tuner.offline.replay.render import oracle_text
from zerotune.tuner.offline.replay.table import CollectiveTable, Shape, from_own
from zerotune.tuner.traces.own.reader import read_own


def statistics(candidate: Candidate, median_us: float, *, is_default: bool = False, **changes: object):
    shape = {"phase": Phase.forward_gather, "message_bytes": MIB, "count": 50} | changes
    key = DecisionKey(
        CommunicatorClass(2, 2), Collective.all_gather, shape["phase"], size_class(shape["message_bytes"])
    )
    return CandidateStatistics(
        key, candidate, is_default, shape["count"], median_us, median_us, 0.03 * median_us, median_us, 0.0
    )


def test_baseline_is_the_sum_of_medians(tmp_path: Path):
    durations = np.random.default_rng(0).lognormal(math.log(100), 0.05, 40)
    table = table_of(
        tmp_path, records(40, durations), records(20, 50.0, collective=Collective.reduce_scatter, first=40)
    )
    (total,) = replay_table(table, ["baseline"]).totals
    assert total.cost_us == pytest.approx(40 * np.median(durations.astype("f4")) + 20 * 50.0, rel=1e-6)
    assert total.n_judged == 60
    assert total.n_refused == 0
    assert (total.gain_low_percent, total.gain_percent, total.gain_high_percent) == (0, 0, 0)
    assert total.n_by_evidence == {"measured_here": 60, "measured_elsewhere": 0, "predicted": 0}


def test_the_last_arrival_counts(tmp_path: Path):
    """The rank that waited saw 300 us, the one that came last 100 us: the collective took 100."""
    waited, came_last = records(9, 300.0), records(9, 100.0)
    came_last = came_last[::-1]
    table = load_table(write_trace(tmp_path, waited, came_last))
    assert len(table.rows) == 9
    assert table.duration_us.tolist() == [100.0] * 9
    assert table.rows["sequence"].tolist() == list(range(9))


def test_decisions_are_not_counted_beside_the_timed_collectives(tmp_path: Path):
    """The plugin logs both, numbered differently; the channels that ran are in the timed record only."""
    timed = records(9, 300.0)
    decisions = timed.copy()
    decisions["flags"], decisions["duration_us"], decisions["n_channels"] = 0, -1.0, 0
    decisions["sequence"] += 4
    table = load_table(write_trace(tmp_path / "a", *[np.concatenate([decisions, timed])] * 2))
    assert table.duration_us.tolist() == [300.0] * 9
    assert set(table.rows["n_channels"].tolist()) == {8}
    bare = load_table(write_trace(tmp_path / "b", decisions))
    assert len(bare.rows) == 9
    assert np.isnan(bare.duration_us).all()


def test_the_communicators_of_the_rank_whose_steps_are_used_are_known(tmp_path: Path):
    mine, others = records(2, 10.0), records(2, 30.0)
    others["comm_id"] = mine["comm_id"] + 1
    table = load_table(write_trace(tmp_path, mine, others))
    assert len(table.rows) == 4
    assert table.own_comms is not None
    assert table.own_comms.tolist() == [5]


def test_what_fewer_ranks_tell_of_is_left_out_and_told(tmp_path: Path):
    """As after a cut in one rank's file: the others' durations may include waiting for it."""
    whole, lone = records(20, 100.0), records(10, 170.0, first=20)
    table = load_table(write_trace(tmp_path / "cut", np.concatenate([whole, lone]), whole))
    assert len(table.rows) == 20
    (total,) = replay_table(table, ["baseline"]).totals
    assert total.cost_us == pytest.approx(2000)
    assert any(note.startswith("Left out: 10 ") for note in table.notes)
    other = np.concatenate([whole, records(10, 170.0, first=20)])
    other["comm_id"][20:] = 9
    alone = load_table(write_trace(tmp_path / "groups", other, whole))
    assert len(alone.rows) == 30, "a communicator of one rank that logs is whole"


def test_jobs_are_not_mixed(tmp_path: Path):
    write_trace(tmp_path, records(3, 1.0), job_id="a")
    write_trace(tmp_path, records(3, 1.0), job_id="b")
    with pytest.raises(TraceError, match="2 jobs"):
        load_table(tmp_path)


def test_oracle_takes_the_best_measured_setting(tmp_path: Path):
    table = table_of(
        tmp_path,
        records(20, 100.0),
        records(20, 60.0, candidate=RING_LL_4, is_default=False, first=20),
    )
    result = replay_table(table, ["baseline", "oracle"])
    best = verdict_of(result, "oracle")
    assert best.setting == str(RING_LL_4)
    assert best.evidence == "measured_here"
    assert best.cost_us == pytest.approx(60)
    baseline, oracle = result.totals
    assert baseline.cost_us == pytest.approx(4000), "all 40, had NCCL's choice run throughout"
    assert oracle.cost_us == pytest.approx(2400)
    assert oracle.gain_percent == pytest.approx(40)
    assert oracle.gain_low_percent < 40 < oracle.gain_high_percent


def test_elsewhere_is_carried_over_as_a_ratio(tmp_path: Path):
    """Elsewhere all is three times as slow; the ratio of 0.5 is what counts here."""
    table = table_of(tmp_path, records(30, 100.0))
    known = [statistics(RING_SIMPLE_8, 300.0, is_default=True), statistics(RING_LL_4, 150.0)]
    best = verdict_of(replay_table(table, ["oracle"], statistics=known), "oracle")
    assert best.evidence == "measured_elsewhere"
    assert best.cost_us == pytest.approx(50)
    assert best.low_us < 47 < 53 < best.high_us


def test_a_sweep_of_another_phase_is_evidence_but_another_size_is_not(tmp_path: Path):
    table = table_of(tmp_path, records(30, 100.0))
    elsewhere = [
        statistics(RING_SIMPLE_8, 100.0, is_default=True, phase=Phase.other),
        statistics(RING_LL_4, 70.0, phase=Phase.other),
    ]
    assert verdict_of(replay_table(table, ["oracle"], statistics=elsewhere), "oracle").cost_us == pytest.approx(70)
    other_size = [
        statistics(RING_SIMPLE_8, 100.0, is_default=True, message_bytes=4 * MIB),
        statistics(RING_LL_4, 70.0, message_bytes=4 * MIB),
    ]
    assert verdict_of(replay_table(table, ["oracle"], statistics=other_size), "oracle").setting != str(RING_LL_4)


def test_refuses_what_it_knows_nothing_of(tmp_path: Path):
    """No durations, no store, no described fabric: every collective is refused, and that is said."""
    block = records(8, -1.0)
    block["flags"] = 0
    directory = tmp_path / "trace"
    log = TraceLog(directory, job_id="j", rank=0, n_ranks=2, fabric_id="", fabric={}, version="0")
    log.record(block)
    log.close()
    with pytest.raises(TraceError):
        replay(directory, ["baseline"])
    result = replay_table(load_table(directory), ["baseline", "table", "model", "oracle"])
    for total in result.totals:
        assert (total.n_judged, total.n_refused) == (0, 8)
        assert total.refused_share_percent == 100
        assert total.cost_us == 0
    assert all(one.cost_us is None and one.evidence == "none" for one in result.verdicts)
    assert len(result.notes) == 4


def test_partial_refusal_is_measured_by_time(tmp_path: Path):
    """A candidate without evidence costs the policy a refusal of its share, and leaves the rest judged."""
    table = table_of(tmp_path, records(10, 100.0), records(10, 300.0, collective=Collective.reduce_scatter, first=10))
    table = CollectiveTable(**{**vars(table), "fabric": {}})
    known = [statistics(RING_SIMPLE_8, 100.0, is_default=True), statistics(RING_LL_4, 80.0)]
    shapes, index = table.shapes()
    estimates = CostEstimates(table, shapes, index, known)
    for shape in shapes:
        is_gather = shape.collective is Collective.all_gather
        assert (estimates.estimate(shape, RING_LL_4) is not None) == is_gather


def test_predictions_are_wide_and_last(tmp_path: Path):
    table = table_of(tmp_path, records(30, 100.0))
    shapes, index = table.shapes()
    estimates = CostEstimates(
        table, shapes, index, (), lambda shape, candidate: (200.0, 0.4) if candidate.is_baseline else (100.0, 0.4)
    )
    predicted = estimates.estimate(shapes[0], RING_LL_4)
    assert predicted is not None
    assert predicted.grade is Grade.predicted
    assert predicted.cost_us == pytest.approx(50), "half of the measured baseline, as predicted"
    assert predicted.high_us > 2 * predicted.cost_us
    here = estimates.estimate(shapes[0], RING_SIMPLE_8)
    assert here is not None
    assert here.grade is Grade.measured_here


def test_a_model_that_misses_what_was_measured_is_doubted_as_much(tmp_path: Path):
    """Sure of itself, and three times off at the baseline: the candidate's prediction may be as far off."""
    table = table_of(tmp_path, records(30, 100.0))
    shapes, index = table.shapes()
    for baseline_us, reach in ((100.0, 1.2), (300.0, 8.0)):
        estimates = CostEstimates(
            table, shapes, index, (), lambda _, one, known=baseline_us: (known if one.is_baseline else known / 2, 0.05)
        )
        predicted = estimates.estimate(shapes[0], Candidate(Algorithm.ring, Protocol.simple, 16))
        assert predicted is not None
        assert predicted.cost_us == pytest.approx(50)
        assert reach < predicted.high_us / predicted.cost_us < 1.3 * reach


@pytest.mark.parametrize(("predicted_us", "believed_us"), [(60.0, 100.0), (10.0, 10.0)])
def test_the_oracle_believes_a_prediction_only_where_its_doubt_leaves_a_gain(
    tmp_path: Path, predicted_us: float, believed_us: float
):
    """A plan names what only the model knows, far from anything that was measured."""
    table = table_of(tmp_path, records(30, 100.0))
    shapes, index = table.shapes()
    estimates = CostEstimates(
        table, shapes, index, (), lambda _, one: (100.0 if one.is_baseline else predicted_us, 0.4)
    )
    plan = [PlanRow(CommunicatorClass(2, 2), Collective.all_gather, Phase.forward_gather, MIB, MIB, RING_LL_4)]
    context = PolicyContext(estimates, plan=plan)
    (oracle, named), (best, other) = judge(shapes, [30], [3000.0], policies.named(["oracle", "table"]), context)
    assert named.cost_us == pytest.approx(30 * predicted_us)
    assert oracle.cost_us == pytest.approx(30 * believed_us)
    assert oracle.gain_low_percent >= 0
    facts = oracle_facts({"oracle": [best], "table": [other]}, [policies.has_others(context, shapes[0])])
    assert facts is not None
    cheaper = [CheaperPolicy("table", 100 - predicted_us, 30, {"predicted": 30})]
    assert list(facts.cheaper) == (cheaper if believed_us > predicted_us else [])
    assert (facts.n_alone, facts.n_refused) == (0, 0)
    assert len(list(oracle_text(facts))) == len(facts.cheaper)


def test_what_the_oracle_cannot_show_is_counted(tmp_path: Path):
    """Calls of which nothing but NCCL's own choice is known, and calls of which nothing is."""
    block = np.concatenate([records(8, 100.0), records(4, -1.0, message_bytes=64 * MIB, first=8)])
    directory = write_trace(tmp_path, block, fabric=FABRIC)
    table = replace(load_table(directory), fabric={})
    result = replay_table(table, ["oracle", "model"])
    assert result.oracle == OracleFacts(n_collectives=12, n_alone=8, n_refused=4)
    assert json.loads(result.to_json())["oracle"]["n_alone"] == 8
    assert replay_table(table, ["baseline"]).oracle is None
    measured = [statistics(candidate, us) for candidate, us in ((RING_SIMPLE_8, 100.0), (RING_LL_4, 70.0))]
    facts = replay_table(table, ["oracle"], statistics=measured).oracle
    assert facts is not None
    assert facts.n_alone == 0


def test_sizes_between_swept_ones_need_no_baseline_there(tmp_path: Path):
    """An active sweep measures the baseline at some sizes only."""
    table = table_of(tmp_path, records(30, 100.0, message_bytes=3 * MIB // 2))
    known = [statistics(RING_LL_4, us, message_bytes=size) for us, size in ((50.0, MIB), (70.0, 2 * MIB))]
    best = verdict_of(replay_table(table, ["oracle"], statistics=known), "oracle")
    assert best.evidence == "measured_elsewhere"
    assert 50 < best.cost_us < 70


def test_intervals_cover(tmp_path: Path):
    """95 % intervals of medians hold the true cost in about 95 of 100 traces."""
    chance = np.random.default_rng(5)
    n_covered = 0
    for _ in range(100):
        blocks = records(25, chance.lognormal(math.log(100), 0.1, 25))
        rows = from_own([read_own(path) for path in _one_trace(tmp_path, blocks)])
        (total,) = replay_table(rows, ["baseline"]).totals
        n_covered += total.low_us <= 2500 <= total.high_us
    assert 85 <= n_covered <= 100


def _one_trace(tmp_path: Path, block: np.ndarray) -> list[Path]:
    directory = tmp_path / f"t{len(list(tmp_path.iterdir()))}"
    write_trace(directory, block)
    return sorted(directory.iterdir())


def test_shapes_count_every_row_once(tmp_path: Path):
    table = table_of(
        tmp_path,
        records(5, 1.0),
        records(7, 1.0, message_bytes=MIB + 1, first=5),
        records(3, 1.0, phase=Phase.backward_gather, first=12),
        records(2, 1.0, collective=Collective.all_reduce, first=15),
    )
    shapes, index = table.shapes()
    counted = {shape: int(count) for shape, count in zip(shapes, np.bincount(index), strict=True)}
    gather = (2, 2, Collective.all_gather)
    assert counted == {
        Shape(*gather, Phase.forward_gather, MIB): 5,
        Shape(*gather, Phase.forward_gather, MIB + 1): 7,
        Shape(*gather, Phase.backward_gather, MIB): 3,
        Shape(2, 2, Collective.all_reduce, Phase.forward_gather, MIB): 2,
    }
    for row, at in zip(table.rows, index, strict=True):
        assert shapes[at].message_bytes == row["message_bytes"]


def test_unknown_policy_and_missing_trace(tmp_path: Path):
    with pytest.raises(UserError, match=r"'best'.*baseline, .*oracle"):
        replay(tmp_path, ["best"])
    with pytest.raises(TraceError, match="none"):
        replay(tmp_path / "none", ["baseline"])


def test_a_trace_without_collectives_is_refused(tmp_path: Path):
    directory = write_trace(tmp_path, records(0, 0.0))
    with pytest.raises(TraceError) as refused:
        replay(directory, ["baseline", "oracle", "model", "table"])
    assert str(directory) in refused.value.problem
    cut = tmp_path / "cut.json"
    cut.write_text('{"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "aten::add", "ts": 1, "dur"')
    with pytest.raises(TraceError) as refused:
        replay(cut, ["baseline"])
    assert refused.value.problem.count("cut.json") == 2, "whose fault it is, too"
    cut = tmp_path / "cut.zttrace"
    cut.write_bytes(next(directory.glob("*.zttrace")).read_bytes()[:20])
    with pytest.raises(TraceError, match="byte 20"):
        replay(cut, ["baseline"])


def test_a_trace_of_which_nothing_can_be_judged_is_refused_with_the_remedy(tmp_path: Path):
    timeless = Path(__file__).parents[1] / "data/pytorch_et/allgather_2gpu_schema_1.0.2.json.gz"
    with pytest.raises(TraceError) as refused:
        replay(timeless, ["baseline", "oracle"])
    assert "--fabric" in refused.value.remedy
    assert replay(timeless, ["baseline"], fabric=FABRIC).totals[0].n_judged == 10


def test_a_plan_whose_settings_nobody_measured_is_named_and_not_the_time_that_is_there(tmp_path: Path):
    trace, plan = tmp_path / "runs.csv", tmp_path / "plan.csv"
    trace.write_text("collective,size_bytes,time_us,ranks,nodes\nall_reduce,1048576,30.5,16,2\n")
    plan.write_text("allreduce,0,4294967295,tree,ll128,4,-1,-1\n")
    with pytest.raises(TraceError, match="tree/ll128/4ch") as refused:
        replay(trace, ["table"], plan=plan)
    assert "--fabric" in refused.value.remedy


def test_what_is_printed(tmp_path: Path):
    directory = write_trace(
        tmp_path,
        np.concatenate([records(20, 100.0), records(20, 60.0, candidate=RING_LL_4, is_default=False, first=20)]),
    )
    result = replay(directory, ["baseline", "oracle"])
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    render(result, console)
    text = console.export_text()
    assert "40 collectives" in text
    assert f"Emulated fabric {FABRIC}" in text
    assert "ring/ll/4ch" in text
    assert "-40.00 %" in text
    assert "measured here" in text
    document = json.loads(result.to_json())
    assert document["totals"][1]["policy"] == "oracle"
    assert document["emulated"] == FABRIC


def test_a_foreign_trace_is_replayed_as_far_as_it_tells(tmp_path: Path):
    """NCCL Inspector: durations but no settings; per-rank bytes become totals."""
    lines = []
    for number in range(20):
        perf = {
            "coll": "AllGather",
            "coll_sn": number,
            "coll_msg_size_bytes": MIB // 2,
            "coll_exec_time_us": 100 + number % 3,
            "coll_timing_source": "kernel_gpu",
        }
        header = {"id": "0xabc", "rank": 0, "n_ranks": 2, "nnodes": 2}
        version = {"inspector_output_format_version": "v4.0", "hostname": "h", "pid": 1}
        lines.append(json.dumps({"header": header, "metadata": version, "coll_perf": perf}))
    path = tmp_path / "h-pid1.log"
    path.write_text("\n".join(lines) + "\n")
    result = replay(path, ["baseline", "oracle"])
    (shape,) = {one.message_bytes for one in result.verdicts}
    assert shape == MIB
    assert [total.cost_us for total in result.totals] == [pytest.approx(2020)] * 2
    assert result.emulated == ""
    assert any("NCCL" in note for note in result.notes), "who chose is not told"
    predicted = replay(path, ["model"], fabric=FABRIC)
    assert predicted.totals[0].n_refused == 0


def with_steps(tmp_path: Path, block: np.ndarray, step_us: float, exposed_us: float) -> CollectiveTable:
    described = fabrics.load(FABRIC)
    log = TraceLog(
        tmp_path, job_id="j", rank=0, n_ranks=2, fabric_id=described.fabric_id, fabric=described.describe(), version="0"
    )
    log.record(block)
    log.steps([StepRecord(step, 0, step_us, exposed_us) for step in range(10)])
    log.close()
    return load_table(tmp_path)


def test_hidden_communication_gains_no_step_time(tmp_path: Path):
    block = np.concatenate([records(20, 100.0), records(20, 50.0, candidate=RING_LL_4, is_default=False, first=20)])
    hidden = replay_table(with_steps(tmp_path / "a", block, 5000.0, 0.0), ["oracle"]).step_estimates
    assert hidden[0].step_us == pytest.approx(5000)
    exposed = replay_table(with_steps(tmp_path / "b", block, 5000.0, 1e6), ["oracle", "baseline"]).step_estimates
    # 40 collectives in 10 steps: 400 us a step as baseline, 200 us as oracle, 300 us as logged (median step).
    assert exposed[0].step_us == pytest.approx(5000 - 100)
    assert exposed[1].step_us == pytest.approx(5000 + 100)
    assert exposed[0].low_us <= exposed[0].step_us <= exposed[0].high_us


def test_a_plan_file_is_a_policy(tmp_path: Path):
    block = np.concatenate([records(20, 100.0), records(20, 60.0, candidate=RING_LL_4, is_default=False, first=20)])
    trace = write_trace(tmp_path / "t", block)
    conf = tmp_path / "nvidia.conf"
    conf.write_text("allgather,0,2000000,ring,ll,4,2,2,-1,-1\n")
    result = replay(trace, ["table"], plan=conf)
    assert result.totals[0].gain_percent == pytest.approx(40)
    conf.write_text("allgather,0,1000,ring,ll,4,2,2,-1,-1\n")
    assert replay(trace, ["table"], plan=conf).totals[0].gain_percent == 0
