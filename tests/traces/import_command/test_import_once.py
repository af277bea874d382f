"""Nothing is recorded twice: not in one call, not in two, and not because something else was said of it."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import trace_samples as samples
from import_runs import command, stored, table

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.sqlite.database import Store
from zerotune.store.wire import OBSERVATION_FIELDS

GATHERS = samples.REAL["nccl_tests"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "s.db"


def test_copies_in_one_folder_are_used_once(tmp_path: Path, store: Path, monkeypatch, capsys):
    """Whatever their line ends, and packed or not."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    text = table(folder / "a.csv", 5).read_bytes()
    (folder / "b.csv").write_bytes(text.replace(b"\n", b"\r\n"))
    (folder / "c.csv.gz").write_bytes(gzip.compress(text))
    table(folder / "d.csv", 3)
    for words in (["--dry-run"], ["--store", store]):
        told = json.loads(command(monkeypatch, capsys, folder, *words, "--json")[1])
        assert told["n_measurements"] == 8
        for copy in ("b.csv ", "c.csv.gz "):
            assert [note.startswith(copy) and " a.csv" in note for note in told["notes"]].count(True) == 1
    assert len(stored(store)) == 8


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (["--default"], ["--setting", "ring/ll"], ("NCCL's own", "ring/ll ")),
        (["--setting", "ring/ll"], ["--default"], ("ring/ll ", "NCCL's own")),
        (["--setting", "ring/ll"], ["--setting", "ring/ll/4"], ("ring/ll ", "ring/ll/4ch")),
    ],
)
def test_the_same_file_cannot_be_two_things(first, second, named, tmp_path: Path, store: Path, monkeypatch, capsys):
    assert command(monkeypatch, capsys, GATHERS, *first, "--store", store)[0] == 0
    before = stored(store)
    code, out, err = command(monkeypatch, capsys, GATHERS, *second, "--store", store)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert 0 <= err.find(named[0]) < err.find(named[1]), "what was said then, and what is said now"
    assert "--store" in err
    assert stored(store) == before
    out = command(monkeypatch, capsys, GATHERS, *first, "--store", store, "--json")[1]
    assert json.loads(out)["n_measurements"] == 0


def test_a_copy_of_a_ranks_trace_is_no_second_run(tmp_path: Path, store: Path, monkeypatch, capsys):
    records = np.zeros(5, OBSERVATION_FIELDS)
    records["message_bytes"], records["n_ranks"], records["n_nodes"], records["flags"] = 4096, 1, 1, 3
    records["duration_us"], records["sequence"], records["start_ns"] = 7.5, np.arange(5), np.arange(1, 6)
    records["algorithm"], records["protocol"], records["collective"] = 1, 2, 4
    folder = tmp_path / "traces"
    folder.mkdir()
    log = TraceLog(folder, job_id="j", rank=0, n_ranks=1, fabric_id="f", fabric={}, version="0")
    log.record(records)
    log.close()
    (trace,) = folder.iterdir()
    shutil.copy(trace, folder / f"copy-of-{trace.name}")
    told = json.loads(command(monkeypatch, capsys, folder, "--store", store, "--json")[1])
    assert (told["n_measurements"], told["fabrics"]) == (5, ["f"])
    assert any(trace.name in note and f"copy-of-{trace.name}" in note for note in told["notes"])
    with Store.open(store, read_only=True) as opened:
        assert opened.measured() == {("j", "f"): 5}
