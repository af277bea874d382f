"""Nothing is recorded twice: not in one call, not in two, and not because something else was said of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import trace_samples as samples
from import_runs import command, stored, table

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
