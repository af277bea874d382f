"""What `zerotune import` says of our own traces: nothing to be frightened of, and nothing hidden."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.records import Algorithm
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner import cli

TIMED = 2


def log_rank(folder: Path, rank: int, n_decisions: int, n_timed: int) -> Path:
    block = np.zeros(n_decisions + n_timed, OBSERVATION_FIELDS)
    block["message_bytes"], block["n_ranks"], block["n_nodes"], block["collective"] = 1 << 20, 2, 1, 2
    block["duration_us"] = np.where(np.arange(len(block)) < n_decisions, -1.0, 50.0)
    block["flags"] = np.where(block["duration_us"] > 0, TIMED, 0)
    block["sequence"], block["algorithm"] = np.arange(len(block)), Algorithm.ring
    log = TraceLog(folder, job_id="j", rank=rank, n_ranks=2, fabric_id="f", fabric={}, version="0")
    log.record(block)
    log.close()
    assert log.path is not None
    return log.path


def said(monkeypatch, capsys, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["zerotune", "import", *map(str, words), "--dry-run"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    captured = capsys.readouterr()
    return int(left.value.code or 0), " ".join(captured.out.split()), captured.err


def test_decisions_are_no_loss_but_what_was_never_timed_is(tmp_path: Path, monkeypatch, capsys):
    log_rank(tmp_path, 0, 100, 100)
    told = json.loads(said(monkeypatch, capsys, tmp_path, "--json")[1])
    assert (told["n_measurements"], told["left_out"]) == (100, {"decision": 100})
    _, text, _ = said(monkeypatch, capsys, tmp_path)
    assert "left out" not in text
    log_rank(tmp_path, 1, 7, 0)
    told = json.loads(said(monkeypatch, capsys, tmp_path, "--json")[1])
    assert told["left_out"] == {"decision": 100, "no_duration": 7}
    _, text, _ = said(monkeypatch, capsys, tmp_path)
    assert "left out: 7 (" in text


@pytest.mark.parametrize("at", [0, 20, 400])
def test_a_damaged_rank_of_ours_is_called_damaged(at: int, tmp_path: Path, monkeypatch, capsys):
    log_rank(tmp_path, 0, 100, 100)
    damaged = log_rank(tmp_path, 1, 100, 100)
    (tmp_path / "README").write_text("hello")
    content = bytearray(damaged.read_bytes())
    content[at : at + 200] = (255 - byte for byte in content[at : at + 200])
    damaged.write_bytes(content)
    code, text, _ = said(monkeypatch, capsys, tmp_path, "--json")
    told = json.loads(text)
    assert (code, told["n_measurements"], told["left_out"]["damaged_file"]) == (0, 100, 1)
    for name in (damaged.name, "README"):
        assert [name in note for note in told["notes"]].count(True) == 1
    code, _, error = said(monkeypatch, capsys, damaged)
    assert (code, error.count("\n")) == (2, 1)
    assert f"{damaged.name} is damaged (" in error


def test_of_a_folder_with_nothing_but_damaged_ranks_the_reason_is_given(tmp_path: Path, monkeypatch, capsys):
    for rank in range(2):
        (tmp_path / f"j.rank0000{rank}.zttrace").write_bytes(b"\x1f\x8bnonsense")
    code, _, error = said(monkeypatch, capsys, tmp_path)
    assert code == 2
    assert ".zttrace is damaged (" in error


@pytest.mark.parametrize(
    ("there", "word"), [("cluster/t.csv", ""), ("cluster", ""), ("cluster", "."), ("cluster/in", "..")]
)
def test_what_tells_no_fabric_is_named_after_its_own_folder_and_says_so(
    there: str, word: str, tmp_path: Path, monkeypatch, capsys
):
    (tmp_path / "cluster" / "in").mkdir(parents=True)
    (tmp_path / "cluster" / "t.csv").write_text(
        "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric,bandwidth_gbps,"
        "latency_us\nallgather,1048576,ring,simple,4,2,16,1,0,0,0,120.5\n"
    )
    if word:
        monkeypatch.chdir(tmp_path / there)
    path = word or tmp_path / there
    for words, name in (((), "cluster"), (("--fabric-id", "mine"), "mine")):
        told = json.loads(said(monkeypatch, capsys, path, *words, "--json")[1])
        assert (told["n_measurements"], told["fabrics"]) == (1, [name])
        _, text, _ = said(monkeypatch, capsys, path, *words)
        assert f"measurements: 1 on fabric {name}" in text
        assert ("--fabric-id" in text) == (not words), "a name that the folder gave may be replaced"


def test_what_was_measured_is_shown_before_it_counts(tmp_path: Path, monkeypatch, capsys):
    rows = ["collective,size_bytes,time_us,ranks,nodes", "all_reduce,1048576,30.5,16,2", "all_reduce,4194304,80,16,2"]
    for name in ("a.csv", "same.csv"):  # a copy counts once
        (tmp_path / name).write_text("\n".join([*rows, "all_gather,1024,9,8,1", ""]))
    reduced = {"collective": "all_reduce", "n_ranks": 16, "n_nodes": 2, "n_measurements": 2}
    gathered = {"collective": "all_gather", "n_ranks": 8, "n_nodes": 1, "n_measurements": 1}
    told = json.loads(said(monkeypatch, capsys, tmp_path, "--default", "--json")[1])
    assert told["measured"] == [
        reduced | {"min_bytes": 1 << 20, "max_bytes": 4 << 20, "min_us": 30.5, "max_us": 80.0},
        gathered | {"min_bytes": 1024, "max_bytes": 1024, "min_us": 9.0, "max_us": 9.0},
    ]
    _, text, _ = said(monkeypatch, capsys, tmp_path, "--default")
    assert all(word in text for word in ("all_reduce", "16 ranks on 2 nodes", "1 MiB to 4 MiB", "30.5 to 80 us"))


def test_what_the_user_can_say_is_named_beside_what_was_left_out(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "a.csv").write_text("collective,size_bytes,time_us,ranks\nall_reduce,1048576,30.5,16\n")
    _, text, _ = said(monkeypatch, capsys, tmp_path, "--default")
    assert "--n-nodes" in text
