"""Options of `zerotune store import` against what files tell; and files of which nothing can be used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import trace_samples as samples
from import_runs import HEADER, OLD_NCCL_TESTS, ROWS, command

from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.left_out import LeftOut

GATHERS = samples.REAL["nccl_tests"]
"""nccl-tests of all_gather; its header names 1 host."""
SWEEP = '{"job_id":"s","fabric_id":"f","n_cells":70,"n_places":10,"n_visited":4,"rows":[{"algbw_gbs":1,"busbw_gbs":1}]}'
FORCED = "host:1:1 [0] NCCL INFO NCCL_ALGO set by environment to Ring\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--default", "--setting", "ring/ll"], ["--setting", "--default"]),
        (["--setting", "tree/ll"], ["tree/ll ", "all_gather", "ring/ll, ring/ll128"]),
        (["--setting", "nvls_tree/simple/4"], ["nvls_tree/simple/4ch", "all_gather"]),
        (["--default", "--fabric-id", "a\nb"], [r"--fabric-id 'a\nb'"]),
        (["--default", "--fabric-id", "a\x1bb"], [r"--fabric-id 'a\x1bb'"]),
        *((["--default", "--fabric-id", name], ["--fabric-id"]) for name in ("", " \t")),
        (["--setting="], ["--setting"]),
        (["--setting", "tree"], ["tree/any ", "all_gather", "ring/ll, ring/ll128"]),
        (["--default", "--format", ""], ["--format"]),
        (["--default", "--nodes", "512"], ["512 nodes"]),
        ([], ["--default", "--setting"]),
    ],
)
def test_impossible_options_are_refused(words: list[str], named: list[str], tmp_path: Path, monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, GATHERS, *words, "--store", tmp_path / "s.db")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(one in err for one in named), err
    assert not (tmp_path / "s.db").exists()


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--default", "--nodes", "2"], "--nodes 2"),
        (["--default", "--collective", "all_reduce"], "--collective all_reduce"),
    ],
)
def test_facts_of_the_file_win_over_options(words: list[str], note: str, tmp_path: Path, monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, GATHERS, *words, "--dry-run", "--json")
    told = json.loads(out)
    assert (code, told["n_measurements"]) == (0, 56)
    assert any(note in one for one in told["notes"])
    assert json.loads(command(monkeypatch, capsys, GATHERS, words[0], "--dry-run", "--json")[1])["notes"] == []


@pytest.mark.parametrize(
    ("time", "reason"),
    [
        ("-5", LeftOut.impossible_time),
        ("0", LeftOut.impossible_time),
        ("1e15", LeftOut.impossible_time),
        ("nan", LeftOut.unknown_name),
        ("1_024", LeftOut.unknown_name),
        ("２０", LeftOut.unknown_name),
        ("", LeftOut.no_duration),
    ],
)
def test_a_wrong_time_is_told_with_its_line(tmp_path: Path, time: str, reason: str, monkeypatch, capsys):
    good, table = ROWS.format(1024, 20), tmp_path / "t.csv"
    bad = good.rpartition(",")[0] + f",{time}\n"
    table.write_text(HEADER + good + bad)
    trace = read_trace(table)
    (rows,) = trace.measurements()
    assert len(rows) == 1
    assert trace.summary.unusable == {reason: 1}
    table.write_text(HEADER + bad)
    code, _, told = command(monkeypatch, capsys, table, "--store", tmp_path / "s.db")
    assert code == 2
    assert (f"latency_us '{time}' in line 2" if time else "latency_us") in " ".join(told.split())


@pytest.mark.parametrize("has_comment", [False, True])
@pytest.mark.parametrize(
    ("place", "what"),
    [
        ("1048576,ring,ll128,8,2.5,16", LeftOut.impossible_ranks_or_nodes),
        ("1048576,ring,ll128,8,2,16.5", LeftOut.impossible_ranks_or_nodes),
        ("1048576,ring,ll128,8,two,16", LeftOut.impossible_ranks_or_nodes),
        ("1048576,ring,ll128,8,2,1e99", LeftOut.impossible_ranks_or_nodes),
        ("1048576.5,ring,ll128,8,2,16", LeftOut.unknown_name),
        ("inf,ring,ll128,8,2,16", LeftOut.unknown_name),
    ],
)
def test_numbers_that_are_not_whole_are_not_cut(tmp_path: Path, place: str, what: str, has_comment: bool):
    """However the rows are read: a comment among them has them read one by one."""
    good, path = ROWS.format(1 << 20, 20), tmp_path / "tuner.csv"
    path.write_text(HEADER + good + "# a comment\n" * has_comment + good.replace("1048576,ring,ll128,8,2,16", place))
    trace = read_trace(path)
    assert len(np.concatenate(list(trace.measurements()))) == 1
    assert trace.summary.unusable == {what: 1}


def test_a_setting_that_was_asked_for_is_not_nccls_own(tmp_path: Path, monkeypatch, capsys):
    table = tmp_path / "t.csv"
    table.write_text(HEADER + ROWS.format(1024, 20) + ROWS.format(1024, 30).replace("ring,ll128,8", "default,,"))
    (rows,) = read_trace(table).measurements(is_default=True)
    assert rows["is_default"].tolist() == [0, 1]
    log = tmp_path / "all_reduce.log"
    log.write_text(OLD_NCCL_TESTS.replace("#       size", f"{FORCED}#       size"))
    told = json.loads(command(monkeypatch, capsys, log, "--default", "--dry-run", "--json")[1])
    assert (told["n_measurements"], told["left_out"]) == (4, {}), "as ring under an unknown protocol"
    assert any("--default" in one for one in told["notes"])
    log.write_text(OLD_NCCL_TESTS)
    told = json.loads(command(monkeypatch, capsys, log, "--default", "--dry-run", "--json")[1])
    assert (told["n_measurements"], told["notes"]) == (4, [])


@pytest.mark.parametrize("dry", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("notes.md", "The algbw and busbw of our cluster\n", "nccl-tests"),
        ("100g.txt", OLD_NCCL_TESTS, "--collective"),
        ("sweep.json", SWEEP, "`zerotune sweep --json`"),
        ("log", "h:1:1 [0] NCCL INFO Bootstrap\n" * 9, "NCCL_DEBUG"),
        ("t.csv", HEADER, "NVIDIA"),
        ("dump_0.json", '{"version": "2.9", "pg_config": {}, "entries": []}', "dump_0.json"),
    ],
)
def test_a_file_without_anything_to_use_is_no_success(
    name: str, content: str, named: str, dry: list[str], tmp_path: Path, monkeypatch, capsys
):
    (tmp_path / name).write_text(content)
    code, out, err = command(monkeypatch, capsys, tmp_path / name, "--default", "--store", tmp_path / "s.db", *dry)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert named in err
    assert not (tmp_path / "s.db").exists()
