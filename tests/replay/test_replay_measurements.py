"""Files of measured settings, and traces that do not tell their ranks: what is judged, and what is said of the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from replay_traces import records, write_trace
from rich.console import Console

from zerotune.store.errors import FabricError, TraceError
from zerotune.tuner.offline.export import export_measurements
from zerotune.tuner.offline.importing.command import import_measurements
from zerotune.tuner.offline.replay import ReplayResult, load_table, render, replay, replay_table
from zerotune.tuner.offline.replay.policies import POLICIES
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.left_out import LeftOut

HEADER = (
    "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,"
    "pipeOps,regBuff,cost_metric,bandwidth_gbps,latency_us"
)
ROW = "allgather,{nbytes},{setting},{channels},{nodes},{ranks},-1,-1,,,{us}"
SIZES = (65536, 1 << 20, 16 << 20)


def csv_of(path: Path, *rows: str) -> Path:
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def row(nbytes: int, setting: str, us: float, *, channels: int = 8, nodes: int = 1, ranks: int = 8) -> str:
    return ROW.format(nbytes=nbytes, setting=setting, channels=channels, nodes=nodes, ranks=ranks, us=us)


def swept(ranks: int = 8, nodes: int = 1) -> list[str]:
    place = {"ranks": ranks, "nodes": nodes}
    return [
        line
        for nbytes in SIZES
        for line in (
            row(nbytes, "default,default", 100.0, channels=0, **place),
            row(nbytes, "ring,ll", 150.0, **place),
            row(nbytes, "ring,simple", 80.0, **place),
        )
    ]


def test_every_row_of_a_sweep_is_a_call_of_its_own(tmp_path: Path):
    result = replay(csv_of(tmp_path / "t.csv", *swept()), ["baseline", "oracle"])
    assert result.n_collectives == 9
    baseline, oracle = result.totals
    assert (baseline.n_judged, baseline.cost_us) == (9, pytest.approx(900))
    assert oracle.cost_us == pytest.approx(720)
    assert "Records: 9; judged: 9." in result.notes
    assert not any("who chose" in note for note in result.notes), "the file says which rows NCCL chose"


def test_rows_of_several_communicators_are_told_apart(tmp_path: Path):
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    render(replay(csv_of(tmp_path / "t.csv", *swept(), *swept(16, 2)), ["oracle"]), console)
    text = console.export_text()
    assert "all_gather other 65,536, 8 ranks on 1 node" in text
    assert "all_gather other 65,536, 16 ranks on 2 nodes" in text


def test_our_own_measurements_are_not_joined_either(tmp_path: Path):
    lines = ["n_ranks,n_nodes,message_bytes,duration_us,collective,algorithm,protocol,n_channels,is_default"]
    lines += [
        f"8,1,{nbytes},{us},all_gather,ring,simple,{n},{n == 0:d}" for nbytes in SIZES for n, us in ((0, 9), (4, 7))
    ]
    (tmp_path / "m.csv").write_text("\n".join(lines) + "\n")
    (total,) = replay(tmp_path / "m.csv", ["oracle"]).totals
    assert (total.n_judged, total.cost_us) == (6, pytest.approx(42))


def test_one_line_says_what_became_of_every_record(tmp_path: Path):
    odd = [
        row(4 << 20, "ring,simple", 70.0),  # NCCL's own choice was not measured there
        row(SIZES[0], "ring,ll", 70.0, channels=99),
        "allgather,4096,ring,simple,4",
    ]
    result = replay(csv_of(tmp_path / "t.csv", *swept(), *odd), ["baseline"])
    (note,) = [note for note in result.notes if note.startswith("Records")]
    assert f"Records: 12; left out: 1 ({LeftOut.few_columns.value}), 1 ({LeftOut.impossible_channels.value});" in note
    assert "; judged: 9; not judged: 1 (" in note
    assert result.totals[0].n_refused == 1
    assert (result.n_left_out, result.left_out_percent) == (2, pytest.approx(100 * 2 / 12))
    headline = rendered(result).splitlines()[0]
    assert "2 (16.7 %)" in headline


def rendered(result: ReplayResult) -> str:
    console = Console(record=True, width=300, file=open("/dev/null", "w"))  # noqa: SIM115
    render(result, console)
    return console.export_text()


def test_what_was_lost_or_not_told_by_all_ranks_is_in_the_headline(tmp_path: Path):
    write_trace(tmp_path, records(12, 50.0), records(9, 50.0), n_dropped=7)
    result = replay(tmp_path, ["baseline"])
    assert (result.n_left_out, result.left_out_percent) == (3, 25.0)
    assert (result.n_dropped, result.dropped_percent) == (14, pytest.approx(100 * 14 / 35))
    headline = rendered(result).splitlines()[0]
    assert "3 (25.0 %)" in headline
    assert "14 (40.0 %)" in headline


RUN = (
    "# nccl-tests version 2.19.6\n# Collective test starting: all_gather_perf\n# nThread 1 nGpus 1\n"
    "#  Rank  0 Group  0 Pid 1 on node1 device  0 [0000:1b:00] X\n"
    "#  Rank  1 Group  0 Pid 2 on node1 device  1 [0000:1c:00] X\n"
    "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    "     time   algbw   busbw #wrong\n        1024           128     float    none      -1"
    "    {us}  {algbw}  {busbw}       0    {us}  {algbw}  {busbw}       0\n# Out of bounds values : 0 OK\n"
)


@pytest.mark.parametrize("in_one_file", [True, False])
def test_runs_of_unnamed_settings_are_no_choice_of_nccls(tmp_path: Path, in_one_file: bool):
    texts = [
        RUN.format(us="20.25", algbw="0.0506", busbw="0.0253"),
        RUN.format(us="90.50", algbw="0.0113", busbw="0.0057"),
    ]
    for number, text in enumerate(["".join(texts)] if in_one_file else texts):
        (tmp_path / f"run{number}.log").write_text(text)
    with pytest.raises(TraceError, match="1,024 bytes on 2 ranks"):
        load_table(tmp_path)
    (tmp_path / "alone.log").write_text(texts[0])
    assert len(load_table(tmp_path / "alone.log").rows) == 2
    store = tmp_path / "s.db"
    options = {"fabric_id": "f", "setting": None, "is_default": True, "n_nodes": None, "dry_run": False}
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"run{number}.log").write_text(text)
    import_measurements(tmp_path / "in", store, **options)
    export_measurements(store, tmp_path / "m.csv")
    assert replay(tmp_path / "m.csv", ["baseline"]).totals[0].n_judged == 4, "somebody said that NCCL chose"


def test_a_forced_setting_is_nobodys_default(tmp_path: Path):
    forced = csv_of(tmp_path / "t.csv", row(SIZES[0], "ring,ll", 150.0))
    with pytest.raises(TraceError):
        replay(forced, ["baseline"])
    result = replay_table(load_table(forced), ["baseline"])
    assert result.totals[0].n_judged == 0
    assert any(note.startswith("Records: 1; judged: 0; not judged: 1 (") for note in result.notes)


def without_ranks(path: Path) -> Path:
    lines = [",".join([*line.split(",")[:5], line.split(",")[-1]]) for line in (HEADER, *swept())]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("fabric", [None, "h100_node"])
def test_every_policy_judges_a_trace_that_does_not_tell_its_ranks(tmp_path: Path, fabric: str | None):
    result = replay(without_ranks(tmp_path / "t.csv"), list(POLICIES), fabric=fabric)
    assert {total.n_judged for total in result.totals} == {9}
    assert any("9 " in note and "h100_node" in note for note in result.notes) == (fabric is not None)


def test_what_has_no_room_on_the_fabric_is_not_predicted_and_said(tmp_path: Path):
    path = csv_of(tmp_path / "t.csv", *swept(), *swept(ranks=16, nodes=2))
    result = replay(path, list(POLICIES), fabric="h100_node")
    assert {total.n_judged for total in result.totals} == {18}
    assert any("9 " in note and "16 ranks on 2 nodes" in note and "h100_node" in note for note in result.notes)


def test_a_fabric_on_which_nothing_has_room_is_refused(tmp_path: Path):
    with pytest.raises(FabricError, match="not 16 ranks on 2 nodes"):
        replay(csv_of(tmp_path / "t.csv", *swept(ranks=16, nodes=2)), ["baseline"], fabric="h100_node")


def test_joined_ranks_are_told(tmp_path: Path):
    for rank in range(2):
        lines = []
        for number in range(5):
            perf = {"coll": "AllGather", "coll_sn": number, "coll_msg_size_bytes": 4096, "coll_exec_time_us": 100}
            header = {"id": "0xabc", "rank": rank, "n_ranks": 2, "nnodes": 2}
            version = {"inspector_output_format_version": "v4.0", "hostname": "h", "pid": 1 + rank}
            perf["coll_timing_source"] = "kernel_gpu"
            lines.append(json.dumps({"header": header, "metadata": version, "coll_perf": perf}))
        (tmp_path / f"h-pid{rank}.log").write_text("\n".join(lines) + "\n")
    result = replay(tmp_path, ["baseline"], fabric="ethernet_boxes")
    assert any(re.fullmatch(r"Records: 10; .*: 10 to 5; judged: 5\.", note) for note in result.notes)


def test_a_table_of_measurements_keeps_the_files_rows(tmp_path: Path):
    path = csv_of(tmp_path / "t.csv", *swept())
    rows = np.concatenate(list(read_trace(path).blocks()))
    table = load_table(path)
    assert table.rows["message_bytes"].tolist() == rows["message_bytes"].tolist()
    assert table.is_default.tolist() == [True, False, False] * 3
