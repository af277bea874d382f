"""What is committed gets from SQLite's log into the store's file while the writer lives, whoever reads."""

from __future__ import annotations

import sqlite3
import time

import pytest

from benchmarks.lib.waiting import wait_until
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.writing import checkpoints, writer


def bytes_of(store: Store) -> tuple[int, int]:
    """Of the file and of its log."""
    return store.path.stat().st_size, store.path.with_name(store.path.name + "-wal").stat().st_size


def rows_in_file_alone(path) -> int:
    """Without the log, as one who copies the file by hand would have it."""
    with sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True) as alone:
        return alone.execute("SELECT count(*) FROM measurements").fetchone()[0]


@pytest.fixture
def idle_s(monkeypatch) -> float:
    monkeypatch.setattr(writer, "IDLE_S", 0.1)
    return 0.1


def test_at_rest_everything_is_in_the_file_and_the_log_is_empty(path, block, idle_s):
    with Store.open(path) as store:
        for _ in range(2):
            store.record_measurements("f", "j", block(5000))
            assert store.flush()
            assert bytes_of(store)[1] > 0
            wait_until(lambda: bytes_of(store)[1] == 0)
            assert rows_in_file_alone(path) == len(store.measurements())


def test_a_writer_that_never_rests_copies_by_time(store, block, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY_S", 0.2)
    for number in range(8):
        store.record_measurements("f", "j", block(500, step=number))
        store.flush()
        time.sleep(0.05)
    assert rows_in_file_alone(store.path) >= 500


def test_a_reader_in_the_middle_neither_waits_nor_holds_the_writer_up(path, block, idle_s):
    with Store.open(path) as store, sqlite3.connect(path, isolation_level=None) as reading:
        store.record_measurements("f", "j", block(100))
        store.flush()
        reading.execute("BEGIN")
        count = "SELECT count(*) FROM measurements"
        assert reading.execute(count).fetchone() == (100,)
        for _ in range(3):
            time.sleep(2 * idle_s)  # the log is to be cut, and cannot
            store.record_measurements("f", "j", block(100))
            began_s = time.monotonic()
            assert store.flush()
            assert time.monotonic() - began_s < 5, "less than SQLite would have waited for the reader"
            assert reading.execute(count).fetchone() == (100,), "of the moment at which it began"
        reading.execute("COMMIT")
        assert reading.execute(count).fetchone() == (400,)
        wait_until(lambda: bytes_of(store)[1] == 0)
    reading.close()


def test_closing_leaves_all_in_the_file_though_others_read(path, block):
    with Store.open(path) as store:
        store.record_measurements("f", "j", block(3000))
        store.flush()
        reading = Store.open(path, read_only=True)
        assert len(reading.measurements()) == 3000
    assert rows_in_file_alone(path) == 3000
    assert bytes_of(store)[1] == 0
    reading.close()
