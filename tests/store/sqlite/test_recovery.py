"""A damaged file: what can be read of it is in the new one, and what cannot is counted."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.records import StepRecord
from zerotune.store.sqlite.database import Store

PAGE_BYTES = 4096
N_ROWS = 5000
JUNK = b"\xa5" * PAGE_BYTES


@pytest.fixture
def written(path: Path, block) -> Path:
    with Store.open(path) as store:
        store.record_job("j", "f", {"gpu": "H100"}, 8)
        store.record_steps("j", [StepRecord(step, 1, 100.0) for step in range(500)])
        store.record_measurements("f", "j", block(N_ROWS, message_bytes=np.arange(N_ROWS) % 300 + 1))
    return path


@pytest.fixture(autouse=True)
def no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of before; without `sqlite3` in it."""
    before = os.environ["PATH"]
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return before


def pages(path: Path, table: str, kind: str = "leaf") -> list[int]:
    """Pages of a table, from 1."""
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = ?"
        try:
            return [number for (number,) in connection.execute(query, (table, kind))]
        except sqlite3.OperationalError:
            pytest.skip("this SQLite cannot say where its pages are")


def overwrite(path: Path, *numbers: int) -> None:
    with path.open("r+b") as file:
        for number in numbers:
            file.seek((number - 1) * PAGE_BYTES)
            file.write(JUNK)


def test_every_row_of_a_store_with_one_damaged_page_is_recovered_or_counted(written):
    whole = written.read_bytes()
    n_set_aside = 0
    for at in range(0, len(whole), PAGE_BYTES * 13):
        written.write_bytes(whole[:at] + JUNK + whole[at + PAGE_BYTES :])
        with Store.open(written) as store:
            state = store.writing
            n_set_aside += bool(state.set_aside)
            if state.set_aside:
                assert Path(state.set_aside).read_bytes() == written_bytes(whole, at)
                assert len(store.measurements()) == state.n_recovered
                assert state.n_missing in (None, N_ROWS - state.n_recovered)
            store.record_steps("new", [StepRecord(1, 1, 1.0)])
            assert store.flush()
    assert n_set_aside > 3


def written_bytes(whole: bytes, at: int) -> bytes:
    return whole[:at] + JUNK + whole[at + PAGE_BYTES :]


@pytest.mark.parametrize("what", ["header", "root"])
def test_without_the_program_a_new_store_is_begun_and_the_old_one_kept(written, caplog, what):
    overwrite(written, 1 if what == "header" else pages(written, "measurements", "internal")[0])
    before = written.read_bytes()
    with Store.open(written) as store:
        assert store.set_aside is not None
        assert store.set_aside.read_bytes() == before
        assert (store.writing.n_recovered, store.writing.n_missing) == (0, None if what == "header" else N_ROWS)
        assert len(store.steps("j")) == (0 if what == "header" else 500)
        store.record_steps("j", [StepRecord(1000, 1, 1.0)])
        assert store.flush()
        assert store.steps("j")[-1].step == 1000
    assert "0 measurements recovered" in caplog.text


def test_pages_that_no_table_leads_to_are_read_by_sqlites_own_program(written, monkeypatch, no_program):
    monkeypatch.setenv("PATH", no_program)
    if shutil.which("sqlite3") is None:
        pytest.skip("there is no sqlite3")
    words = ["sqlite3", f"{written.as_uri()}?immutable=1", ".recover --ignore-freelist"]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("this sqlite3 has no .recover")
    overwrite(written, *(pages(written, table, "internal")[0] for table in ("measurements", "steps")))
    with Store.open(written) as store:
        assert (store.writing.n_recovered, store.writing.n_missing) == (N_ROWS, 0)
        assert [one.step for one in store.steps("j")] == [*range(500)]
        assert store.measurements()["message_bytes"].tolist() == (np.arange(N_ROWS) % 300 + 1).tolist()


PROGRAM = """#!/bin/sh
cat <<'END'
CREATE TABLE evil(x);
INSERT OR IGNORE INTO 'measurements'('id', 'series', 'job', 'epoch', 'step', 'duration_us', 'memory_pressure', \
'measured_at_s', 'checksum') VALUES (9001, 1, 1, 0, 9001, 1.5, NULL, 1, 7);
INSERT OR IGNORE INTO 'measurements'('id', 'series', 'job', 'epoch', 'step', 'duration_us', 'memory_pressure', \
'measured_at_s') VALUES (9002, 1, 1, 0, 9002, 'no duration', NULL, 1);
INSERT INTO 'measurements'('id') SELECT 1; DELETE FROM jobs;
INSERT OR IGNORE INTO 'jobs'('id', 'job_id', 'name') VALUES (7, replace('a\\nb', '\\n', char(10)), hex(zeroblob(9)));
INSERT OR IGNORE INTO 'jobs'('id', 'job_id') VALUES (8, replace('a\\nb', '\\n', char(10)));
INSERT INTO 'sqlite_schema' VALUES ('table', 'x', 'x', 0, 'CREATE TABLE x(y)');
DELETE FROM jobs;
CREATE TABLE lost_and_found(rootpgno INTEGER, pgno INTEGER, nfield INTEGER, id INTEGER, c0, c1, c2, c3, c4, c5, c6, \
c7, c8);
INSERT INTO lost_and_found VALUES(17, 17, 9, 9003, NULL, 1, 1, 0, 9003, 0.25, 0.5, 1795977787, 4075886997);
INSERT INTO lost_and_found VALUES(18, 18, 9, 9004, NULL, 'text', 1, 0, 9004, 0.25, 0.5, 'text', 1);
INSERT INTO lost_and_found VALUES(19, 19, 7, NULL, 1, 9005, 1, 5, NULL, NULL, 3610916215, NULL, NULL);
COMMIT;
END
"""


def test_of_what_the_program_writes_nothing_but_rows_is_used(written, tmp_path, monkeypatch, no_program):
    (tmp_path / "bin" / "sqlite3").write_text(PROGRAM)
    (tmp_path / "bin" / "sqlite3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{no_program}")
    overwrite(written, pages(written, "measurements", "internal")[0])
    with Store.open(written) as store:
        assert store.measurements()["step"].tolist() == [9001, 9003]
        assert store.writing.n_missing == N_ROWS - 2
        assert [job.job_id for job in store.jobs()] == ["j", "a\nb"]
        assert [one.step for one in store.steps("j")] == [*range(500), 9005]
    with closing(sqlite3.connect(written)) as connection:
        assert not connection.execute("SELECT 1 FROM sqlite_master WHERE name IN ('evil', 'x')").fetchall()


def test_a_program_that_writes_without_end_is_stopped(written, tmp_path, monkeypatch, no_program):
    (tmp_path / "bin" / "sqlite3").write_text("#!/bin/sh\nexec yes 'CREATE TABLE evil(x);'\n")
    (tmp_path / "bin" / "sqlite3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{no_program}")
    overwrite(written, pages(written, "measurements", "internal")[0])
    with Store.open(written) as store:
        assert (store.writing.n_recovered, len(store.steps("j"))) == (0, 500)
