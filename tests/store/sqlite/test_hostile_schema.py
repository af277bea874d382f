"""A store's file brings our tables and nothing that SQLite would run."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

import pytest

from zerotune.store.errors import StoreError
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.soundness import check, repair

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT"
BROUGHT = {
    "trigger": "CREATE TRIGGER t AFTER UPDATE ON jobs BEGIN DELETE FROM measurements; END",
    "steps": f"ALTER TABLE steps RENAME TO s; CREATE VIEW steps AS {ENDLESS} 1 AS job, n AS step, 1 AS epoch,"
    " 1.0 AS duration_us, NULL AS exposed_us, NULL AS memory_pressure, NULL AS checksum FROM r",
    "jobs": f"PRAGMA legacy_alter_table = 1; ALTER TABLE jobs RENAME TO j; CREATE VIEW jobs AS SELECT * FROM j"
    f" WHERE ({ENDLESS} count(*) FROM r) > 0",
    "migrations": f"ALTER TABLE _sqlite_migrations RENAME TO m; CREATE VIEW _sqlite_migrations AS {ENDLESS}"
    " 'zerotune' AS migration_set, 'm001_first_schema' AS name, n AS rowid FROM r",
    "tallies": f"ALTER TABLE tallies RENAME TO t; CREATE VIEW tallies AS {ENDLESS} 'x' AS name, n AS n_rows FROM r",
    "index": "CREATE INDEX i ON jobs (length(replace(hex(zeroblob(100000000)), '0', job_id)))",
    "virtual": "CREATE VIRTUAL TABLE v USING fts5(x)",
}
LONGEST_S = 20.0


@pytest.fixture(params=BROUGHT)
def path(request, tmp_path):
    path = tmp_path / "store.db"
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(BROUGHT[request.param])
    return path


def test_it_is_neither_run_nor_called_sound(path):
    began_s = time.monotonic()
    with pytest.raises(StoreError):
        Store.open(path, read_only=True)
    assert not check(path).is_sound
    with Store.open(path) as store:
        assert store.set_aside is not None
    assert time.monotonic() - began_s < LONGEST_S


def test_a_repair_keeps_the_rows_and_nothing_else(path):
    repair(path)
    assert check(path).is_sound
    with closing(sqlite3.connect(path)) as connection:
        kinds = connection.execute("SELECT DISTINCT type FROM sqlite_master ORDER BY type").fetchall()
    assert kinds == [("index",), ("table",)]
    Store.open(path).close()
