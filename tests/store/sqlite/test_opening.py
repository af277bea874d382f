"""Every way in which a store can refuse to open, and what survives a kill -9."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from sqlite_utils import Database, Migrations

from zerotune.store.errors import StoreError, StoreLockedError, StoreVersionError
from zerotune.store.records.lateness import Lateness, LateRank
from zerotune.store.records.passages import Passage, PassageKind, Passages
from zerotune.store.sqlite import migrations
from zerotune.store.sqlite.backup import back_up
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.opening import open_for_reading
from zerotune.store.sqlite.rows.measurements import SERIES_COLUMNS
from zerotune.store.sqlite.soundness import check

WRITE_UNTIL_KILLED = """
import sys
import numpy as np
from zerotune.store.sqlite.database import MEASUREMENT, Store

store = Store.open(sys.argv[1])
block = np.zeros(200, MEASUREMENT)
block["n_ranks"], block["message_bytes"], block["collective"] = 8, 1024, 2
number = 0
while True:
    block["step"] = number
    store.record_measurements("fabric", "job", block)
    store.flush()
    number += 1
    print(number, flush=True)
"""


def test_a_second_writer_is_refused_by_command_and_pid(path, store):
    with pytest.raises(StoreLockedError, match=rf"pid {os.getpid()}\).*ZEROTUNE_STORE"):
        Store.open(path)


def test_closing_frees_the_lock_and_leaves_one_file(path, block):
    for _ in range(2):
        with Store.open(path) as store:
            store.record_measurements("f", "j", block(1))
        store.close()
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    with Store.open(path, read_only=True) as store:
        assert len(store.measurements()) == 2


def test_read_only_works_beside_the_writer_and_cannot_write(path, store, block):
    with Store.open(path, read_only=True) as reading:
        store.record_measurements("f", "j", block(5))
        store.flush()
        assert len(reading.measurements()) == 5
        with pytest.raises(StoreError, match="reading only"):
            reading.record_measurements("f", "j", block(1))
        with closing(open_for_reading(path)) as connection, pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("DELETE FROM main.measurements")


@pytest.fixture
def writer(path):
    """The pid of a process that writes the store until the test ends."""
    command = [sys.executable, "-c", WRITE_UNTIL_KILLED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        yield child.pid
        child.kill()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_has_the_lock_of_what_it_leads_to(path, writer, tmp_path, what):
    if what == "file":
        (tmp_path / "link.db").symlink_to(path)
    else:
        (tmp_path / "link").symlink_to(path.parent)
    link = tmp_path / "link.db" if what == "file" else tmp_path / "link" / path.name
    with pytest.raises(StoreLockedError, match=rf"pid {writer}\)"):
        Store.open(link)


def test_a_store_of_two_names_is_written_under_neither(path, tmp_path, block):
    with Store.open(path) as store:
        store.record_measurements("f", "j", block(5))
    (tmp_path / "other.db").hardlink_to(path)
    for name in (path, tmp_path / "other.db"):
        with pytest.raises(StoreError, match=str(name)):
            Store.open(name)
    (tmp_path / "other.db").unlink()
    with Store.open(path) as store:
        assert len(store.measurements()) == 5


def test_kill_9_loses_only_the_batch_in_flight(path):
    child = subprocess.Popen([sys.executable, "-c", WRITE_UNTIL_KILLED, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        committed = 0
        while committed < 20:
            committed = int(child.stdout.readline())
        with pytest.raises(StoreLockedError, match=rf"pid {child.pid}\)"):
            Store.open(path)
    finally:
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
    committed = max([committed, *map(int, rest.split())])
    assert (path.parent / "store.db.lock").exists(), "the dead writer's lock file is still there"
    with Store.open(path) as store:  # and is taken over
        assert store.set_aside is None
        steps, counts = np.unique(store.measurements()["step"], return_counts=True)
    np.testing.assert_array_equal(counts, 200, "a batch is there in part")
    np.testing.assert_array_equal(steps, np.arange(len(steps)))
    assert committed <= len(steps) <= committed + 1


@pytest.mark.parametrize("damage", ["not a database", "torn page", "truncated"])
def test_a_corrupt_file_is_set_aside_and_never_overwritten(path, block, caplog, damage):
    with Store.open(path) as store:
        store.record_measurements("f", "j", block(5000, message_bytes=np.arange(1, 5001)))
    healthy = path.read_bytes()
    corrupt = {
        "not a database": b"this is no database" * 1000,
        "torn page": healthy[:8192] + os.urandom(8192) + healthy[16384:],
        "truncated": healthy[: len(healthy) // 2 - 100],
    }[damage]
    for n_before in range(2):  # twice within a second: both are kept
        path.write_bytes(corrupt)
        with Store.open(path) as store:
            assert store.set_aside is not None
            assert store.set_aside.read_bytes() == corrupt
            assert len(store.measurements()) == store.writing.n_recovered
        assert len(list(path.parent.glob("store.db.corrupt-*"))) == n_before + 1
        assert str(store.set_aside) in caplog.text


def test_a_corrupt_file_is_reported_and_left_alone_when_reading(path):
    path.parent.mkdir()
    path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(StoreError, match=path.name):
        Store.open(path, read_only=True)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_store_of_a_newer_version_is_refused_untouched(path, read_only):
    Store.open(path).close()
    database = Database(path)
    database["_sqlite_migrations"].insert(
        {"migration_set": "zerotune", "name": "m999_from_the_future", "applied_at": ""}
    )
    database.close()
    before = path.read_bytes()
    with pytest.raises(StoreVersionError, match="m999_from_the_future"):
        Store.open(path, read_only=read_only)
    assert path.read_bytes() == before
    assert not list(path.parent.glob("*.lock")), "no lock is left behind"


@pytest.mark.parametrize("read_only", [False, True])
def test_another_applications_database_is_refused_untouched(path, read_only):
    path.parent.mkdir()
    database = Database(path)
    database["recipes"].insert({"name": "soup"})
    database.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another application"):
        Store.open(path, read_only=read_only)
    assert path.read_bytes() == before


def test_an_older_schema_needs_a_writer_once(path, monkeypatch):
    Store.open(path).close()
    database = Database(path)
    database.execute("ALTER TABLE decisions DROP COLUMN step")
    database["_sqlite_migrations"].delete_where("name = ?", ["m002_step_of_decisions"])
    database.close()
    monkeypatch.setattr("zerotune.store.sqlite.opening.READABLE_WITHOUT", ())
    with pytest.raises(StoreError, match="older zerotune"):
        Store.open(path, read_only=True)


def test_an_unwritable_directory_is_named_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for impossible in (tmp_path / "file" / "store.db", "/proc/zerotune/store.db"):
        with pytest.raises(StoreError, match=r"directory .*ZEROTUNE_STORE"):
            Store.open(impossible)


def test_a_file_that_never_was_a_store_is_left_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('precious')")
    with pytest.raises(StoreError, match=r"train\.py"):
        Store.open(script)
    assert script.read_text() == "print('precious')"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("column", "step", "seen"),
    [
        ("passages", "m004_what_passed_the_tuner_by", Passages((Passage(PassageKind.copy_engine, 2, 4096),), 1)),
        ("lateness", "m006_who_was_late", Lateness(9, 1.5, 2.5, (LateRank(5, 1800.0, 0.92, 3, 8, "c"),))),
        ("failure", "m007_failures", "rank 1: RuntimeError"),
        ("environment", "m010_environment_of_jobs", "NCCL_BUFFSIZE=8388608"),
    ],
)
def test_a_store_of_before_a_job_had_them_is_read_and_brought_up(path, column, step, seen):
    with Store.open(path) as store:
        store.record_job("j", "f", {}, 2)
    database = Database(path)
    for dropped in {column} | ({"training"} if column == "environment" else set()):
        database.execute(f"ALTER TABLE jobs DROP COLUMN {dropped}")
    database["_sqlite_migrations"].delete_where("name = ?", [step])
    database.close()
    with Store.open(path, read_only=True) as store:
        assert [getattr(one, column) for one in store.jobs()] == [type(seen)()]
    with Store.open(path) as store:
        store.update_job("j", **{column: seen})
        store.update_job("j", ended_at_s=1.0)
        store.flush()
        assert [getattr(one, column) for one in store.jobs()] == [seen]


def test_a_store_of_before_chunk_sizes_is_read_and_brought_up(path, block):
    older = Migrations("zerotune")
    for name, step in migrations._STEPS.items():
        if name < "m011":
            older()(step)
    path.parent.mkdir(mode=0o700)
    database = Database(path)
    older.apply(database)
    database.execute(f"PRAGMA application_id = {migrations.APPLICATION_ID}")
    database["fabrics"].insert({"id": 1, "fabric_id": "f"})
    database["jobs"].insert({"id": 1, "job_id": "j", "fabric": 1})
    (row,) = block(1)
    setting = {name: row[name].item() for name in SERIES_COLUMNS[1:] if name != "chunk_bytes"}
    database["series"].insert({"id": 7, "fabric": 1, **setting})
    told = {name: row[name].item() for name in ("epoch", "step", "duration_us")}
    database["measurements"].insert({"id": 1, "series": 7, "job": 1, "measured_at_s": 1, **told})
    database["tallies"].update("measurements", {"n_rows": 1})
    database.close()
    with Store.open(path, read_only=True) as store:
        assert [*store.series("f")] == [7]
        assert len(store.measurements("f")) == 1
    with Store.open(path) as store:
        store.record_measurements("f", "j", block(1))
        store.record_measurements("f", "j", block(1, chunk_bytes=4096))
        store.flush()
        assert store.set_aside is None
        assert [one["chunk_bytes"] for one in store.series("f").values()] == [0, 4096]
        assert len(store.measurements("f")) == 2
    assert check(path).is_sound


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_no_store_is_written_where_anyone_may_put_links(path, mode):
    Store.open(path).close()
    path.parent.chmod(mode)
    with pytest.raises(StoreError) as refused:
        Store.open(path)
    assert ("chmod" in refused.value.remedy) == (mode == 0o777), "a sticky folder, as /tmp, stays as it is"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    Store.open(path, read_only=True).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("given_away", ["store.db", "."])
def test_no_store_is_written_that_is_another_users(path, given_away):
    Store.open(path).close()
    os.chown(path.parent / given_away, 65534, -1)
    before = path.read_bytes()
    with pytest.raises(StoreError):
        Store.open(path)
    assert path.read_bytes() == before
    Store.open(path, read_only=True).close()


def test_a_store_that_was_open_to_others_is_closed_to_them(path):
    Store.open(path).close()
    path.chmod(0o666)
    with Store.open(path, read_only=True):
        assert path.stat().st_mode & 0o777 == 0o666
    with Store.open(path):
        assert path.stat().st_mode & 0o777 == 0o640


def test_a_store_is_closed_to_others_under_any_umask(path, tmp_path, block):
    umask = os.umask(0)
    try:
        with Store.open(path) as store:
            store.record_measurements("f", "j", block(5))
            store.flush()
            back_up(path, tmp_path / "copy.db")
            made = [path.parent, tmp_path / "copy.db", *path.parent.iterdir()]
            modes = {one.name: one.stat().st_mode & 0o077 for one in made}
    finally:
        os.umask(umask)
    assert len(modes) == 6
    assert not any(modes.values()), modes
