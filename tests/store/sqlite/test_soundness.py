"""`check` counts what is damaged; `repair` puts a fresh store in its place, wherever it is cut off."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.lib.command_line import zerotune
from zerotune.store.errors import StoreError, StoreLockedError
from zerotune.store.records import StepRecord
from zerotune.store.sqlite import soundness
from zerotune.store.sqlite.database import Store
from zerotune.tuner import cli

PAGE_BYTES = 4096
N_ROWS = 5000


@pytest.fixture
def written(path: Path, block) -> Path:
    with Store.open(path) as store:
        store.record_job("j", "f", {}, 8)
        store.record_steps("j", [StepRecord(step, 1, 100.0) for step in range(500)])
        store.record_measurements("f", "j", block(N_ROWS))
    return path


def overwrite(path: Path, *pages: int) -> None:
    """Put other bytes in the place of pages, counted from 0."""
    with path.open("r+b") as file:
        for number in pages:
            file.seek(number * PAGE_BYTES)
            file.write(b"\xa5" * PAGE_BYTES)


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def names(path: Path) -> set[str]:
    return {one.name for one in path.parent.iterdir() if not one.name.endswith(("-wal", "-shm"))}


def test_a_sound_store_is_sound_and_left_alone(written):
    before = written.read_bytes()
    found = soundness.check(written)
    assert found.is_sound
    assert found.tables["measurements"] == soundness.TableSoundness(N_ROWS, 0)
    assert soundness.repair(written).kept is None
    assert written.read_bytes() == before


@pytest.mark.parametrize(
    ("statement", "table"),
    [
        ("UPDATE measurements SET duration_us = 'nope' WHERE id IN (7, 8)", "measurements"),
        ("DELETE FROM measurements WHERE id IN (7, 8)", "measurements"),
        ("UPDATE steps SET duration_us = 'nope' WHERE step < 2", "steps"),
    ],
)
def test_damaged_rows_are_counted_and_left_out_by_a_repair(written, statement, table):
    change(written, statement)
    found = soundness.check(written)
    assert not found.is_sound
    assert not found.problems
    assert {name: one.n_damaged for name, one in found.tables.items() if one.n_damaged} == {table: 2}
    done = soundness.repair(written)
    assert done.found.tables == found.tables
    assert done.kept is not None
    assert soundness.check(written).is_sound
    assert not soundness.check(done.kept).is_sound, "the damaged one is as it was"


def test_rows_on_damaged_pages_are_counted(written):
    overwrite(written, 30, 40)
    found = soundness.check(written)
    assert found.problems
    n_sound = found.tables["measurements"].n_sound
    assert 0 < (found.tables["measurements"].n_damaged or 0) < 500
    before = written.read_bytes()
    done = soundness.repair(written)
    assert done.kept is not None
    assert done.kept.read_bytes() == before
    with Store.open(written) as store:
        assert (len(store.measurements()), store.set_aside) == (n_sound, None)


@pytest.mark.parametrize("content", [b"x", b"\xa5" * 5000, b"SQLite format 3\0" + b"\xa5" * 8176])
def test_a_file_with_nothing_of_ours_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "store.db"
    path.write_bytes(content)
    for do in (soundness.check, soundness.repair):
        with pytest.raises(StoreError):
            do(path)
    assert (path.read_bytes(), names(path)) == (content, {path.name})
    for command in ("check", "repair"):
        code, _, error = zerotune("store", command, str(path))
        assert (code, error.count("\n")) == (2, 1), error


def test_an_empty_store_that_is_damaged_is_one_of_ours(path):
    Store.open(path).close()
    overwrite(path, 3)
    assert not soundness.check(path).is_sound
    assert soundness.repair(path).kept is not None
    assert soundness.check(path).is_sound


def root_page(path: Path, name: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (number,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    return number - 1


@pytest.mark.parametrize("table", ["fabrics", "jobs"])
def test_missing_rows_that_others_name_get_stand_ins(written, table):
    overwrite(written, root_page(written, table))
    found = soundness.check(written)
    assert not found.is_sound
    assert (found.stand_ins, found.tables[table].n_sound) == (1, 0)
    done = soundness.repair(written)
    assert done.found.stand_ins == found.stand_ins
    assert soundness.check(written).is_sound
    with Store.open(written) as store:
        (job,) = store.jobs()
        assert (store.fabrics() if table == "fabrics" else {job.job_id: {}}) == {"recovered-1": {}}
        rows = store.measurements(**{"fabric_id" if table == "fabrics" else "job_id": "recovered-1"})
        assert (len(rows), len(store.steps(job.job_id))) == (N_ROWS, 500)


def test_rows_added_during_the_check_are_no_damage(path, restless_writer):
    for n_batches in (5, 10, 15):
        restless_writer.wait_for(n_batches)
        assert soundness.check(path).is_sound
    with pytest.raises(StoreLockedError):
        soundness.repair(path)
    restless_writer.kill()
    assert soundness.repair(path).kept is None


def test_the_commands_say_in_exit_codes_and_numbers(written):
    code, text, _ = zerotune("store", "check", str(written), "--json")
    assert (code, json.loads(text)["is_sound"]) == (0, True)
    overwrite(written, 30)
    code, text, _ = zerotune("store", "check", str(written), "--json")
    found = json.loads(text)
    assert (code, found["is_sound"]) == (1, False)
    with Store.open(written.parent / "other.db"):
        code, _, error = zerotune("store", "repair", str(written.parent / "other.db"))
        assert (code, error.count("\n")) == (2, 1)
    code, text, _ = zerotune("store", "repair", str(written), "--json")
    assert (code, json.loads(text)["tables"]) == (0, found["tables"])
    assert Path(json.loads(text)["kept"]).exists()
    assert zerotune("store", "check", str(written))[0] == 0


def test_a_check_that_a_batch_system_ends_leaves_no_copy_of_the_store(written, tmp_path, monkeypatch):
    """The copy may have gigabytes."""
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    seen = []

    def end(*_):
        seen.extend(copies.rglob("*.db"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("zerotune.store.sqlite.soundness.recover", end)
    monkeypatch.setattr(sys, "argv", ["zerotune", "store", "check", str(written)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert (left.value.code, len(seen), list(copies.iterdir())) == (130, 1, [])


def test_another_applications_database_is_neither_checked_nor_repaired(tmp_path):
    change(tmp_path / "other.db", "CREATE TABLE recipes (name)")
    before = (tmp_path / "other.db").read_bytes()
    for do in (soundness.check, soundness.repair):
        with pytest.raises(StoreError, match="another application"):
            do(tmp_path / "other.db")
    assert (tmp_path / "other.db").read_bytes() == before
    assert names(tmp_path / "other.db") == {"other.db"}


@pytest.mark.parametrize("cut_off", ["while it is written", "before the old is moved", "between", "log moved"])
def test_a_replacement_that_was_cut_off_is_ended_by_the_next_opening(written, block, cut_off):
    """The files as kill -9 leaves them."""
    folder, stamp = written.parent, "20260101-000000"
    with Store.open(folder / "fresh.db") as fresh:
        fresh.record_measurements("f", "j", block(4000))
    new = folder / f"store.db.new-{stamp}"
    if cut_off == "while it is written":
        (folder / "fresh.db").rename(f"{new}.partial")
        (folder / f"{new.name}.partial-journal").write_bytes(b"not a store")
    else:
        (folder / "fresh.db").rename(new)
        (folder / f"store.db.corrupt-{stamp}-wal").write_bytes(b"old log")
        if cut_off == "between":
            written.rename(folder / f"store.db.corrupt-{stamp}")
    is_whole = cut_off != "while it is written"
    with Store.open(written) as store:
        assert len(store.measurements()) == (4000 if is_whole else N_ROWS)
    assert names(written) == {"store.db", *([f"store.db.corrupt-{stamp}"] if is_whole else [])}
    if is_whole:
        with closing(sqlite3.connect(f"file:{folder}/store.db.corrupt-{stamp}?immutable=1", uri=True)) as old:
            assert old.execute("SELECT count(*) FROM measurements").fetchone() == (N_ROWS,)
