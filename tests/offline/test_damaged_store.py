"""Commands that read a store in which every second row of a table has a damaged cell."""

from __future__ import annotations

import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from report_material import make_store

from zerotune.store.records import ModelRecord
from zerotune.store.sqlite.database import Store
from zerotune.tuner import cli

COMMANDS = (
    ["store", "models"],
    ["explain"],
    ["report", "{out}/r.html"],
    ["report", "--plot", "list"],
    ["store", "export", "{out}/p.json"],
    ["store", "export", "{out}/t.conf", "--to", "nvidia-csv"],
    ["store", "export", "{out}/m.csv", "--to", "measurements"],
    ["daemon", "metrics"],
)
DAMAGED_COLUMN = {"jobs": "stage", "measurements": "duration_us", "steps": "epoch", "decisions": "alternatives"}


OTHERS = [pytest.param(one, marks=pytest.mark.slow) for one in ("jobs", "steps", "decisions")]


@pytest.mark.parametrize("table", ["measurements", *OTHERS])
def test_reading_ends_with_a_line_and_no_traceback(tmp_path: Path, table: str, monkeypatch, capsys, caplog):
    path = make_store(tmp_path / "s.db")
    with Store.open(path) as store:
        for name in ("kriging", "stage-lstm"):
            store.save_model(ModelRecord(name, "f", b"junk", {"model": name}, "hash", 0.1, 100.0))
    row = "step" if table == "steps" else "rowid"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {DAMAGED_COLUMN[table]} = '{{nope' WHERE {row} % 2 = 1")
    for words in COMMANDS:
        words = [word.format(out=tmp_path) for word in words]
        monkeypatch.setattr(sys, "argv", ["zerotune", *words, "--store", str(path)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        assert left.value.code in (0, 2), said.err
        assert len(said.err.splitlines()) <= 1, said.err
        assert left.value.code == 0 or said.err.startswith("zerotune: ")
    if table != "measurements":
        assert re.search(rf"\b[1-9]\d* of {table}\b", caplog.text)
    with Store.open(path) as store:  # the daemon begins
        assert store.set_aside is None
