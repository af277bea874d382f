"""Replay: sums of medians where there is evidence, refusal where there is none, intervals that are honest."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from replay_traces import FABRIC, MIB, RING_LL_4, RING_SIMPLE_8, records, table_of, verdict_of, write_trace

from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.errors import TraceError, UserError
from zerotune.store.records import (
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    StepRecord,
    size_class,
)
from zerotune.tuner.offline.replay import replay, replay_table
from zerotune.tuner.offline.replay.estimates import CostEstimates
from zerotune.tuner.offline.replay.reading import load_table
from zerotune.tuner.offline.replay.table import CollectiveTable, from_own
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


def test_calls_logged_by_some_ranks_only_are_left_out_and_told(tmp_path: Path):
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


def test_bandits_play_a_shape_of_a_single_call(tmp_path: Path):
    """NCCL's own choice is one setting to them, under whichever name it is known."""
    for total in replay_table(table_of(tmp_path, records(1, 100.0)), ["ucb", "thompson"]).totals:
        assert total.cost_us == pytest.approx(100)
        assert total.n_judged == 1


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
    estimates = CostEstimates(table, known)
    for shape in table.shapes[0]:
        is_gather = shape.collective is Collective.all_gather
        assert (estimates.estimate(shape, RING_LL_4) is not None) == is_gather


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
