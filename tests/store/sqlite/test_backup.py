"""A backup is a store by itself, whole or not there, whatever happens to the store and to the backup meanwhile."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.errors import StoreError
from zerotune.store.sqlite.backup import back_up
from zerotune.store.sqlite.database import Store


@pytest.fixture
def filled(path, block):
    with Store.open(path) as store:
        store.record_measurements("f", "j", block(10))
    return path


def files(folder) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_backup_is_a_store_of_one_file(filled, tmp_path, block):
    copy = tmp_path / "copy.db"
    assert back_up(filled, copy) == copy.stat().st_size
    with Store.open(copy, read_only=True) as store:
        np.testing.assert_array_equal(store.measurements(), block(10))
    assert files(tmp_path) == {"data", "copy.db"}
    with Store.open(copy) as store:
        store.record_measurements("f", "j", block(10))
        store.flush()
        assert len(store.measurements()) == 20


def test_nothing_is_overwritten_unasked(filled, tmp_path):
    copy = tmp_path / "copy.db"
    copy.write_bytes(b"precious")
    with pytest.raises(StoreError, match="exists already"):
        back_up(filled, copy)
    assert copy.read_bytes() == b"precious"
    back_up(filled, copy, may_overwrite=True)
    with Store.open(copy, read_only=True) as store:
        assert len(store.measurements()) == 10


def test_a_backup_overwrites_neither_the_store_nor_a_used_database(filled, tmp_path, block):
    link = tmp_path / "link.db"
    link.symlink_to(filled)
    for target in (filled, link):
        with pytest.raises(StoreError, match="itself"):
            back_up(filled, target, may_overwrite=True)
    with Store.open(tmp_path / "other.db") as other:
        other.record_measurements("f", "j", block(3))
        other.flush()
        with pytest.raises(StoreError, match="in use"):
            back_up(filled, tmp_path / "other.db", may_overwrite=True)
        assert len(other.measurements()) == 3


def test_a_backup_that_cannot_be_written_leaves_what_was_there(filled, tmp_path, monkeypatch):
    with pytest.raises(StoreError, match=r"directory/copy\.db"):
        back_up(filled, tmp_path / "no" / "such" / "directory" / "copy.db")
    copy = tmp_path / "copy.db"
    copy.write_bytes(b"precious")
    monkeypatch.setattr(Path, "replace", lambda *_: os.close(-1))
    with pytest.raises(StoreError, match=r"copy\.db"):
        back_up(filled, copy, may_overwrite=True)
    assert copy.read_bytes() == b"precious"
    assert files(tmp_path) == {"data", "copy.db"}


def test_backups_of_a_store_that_is_written_are_of_one_moment_each(path, tmp_path, restless_writer):
    """Every batch of the writer is there whole, none is missing before the last."""
    for number in range(5):
        restless_writer.wait_for(10 * (number + 1))
        back_up(path, tmp_path / f"{number}.db")
    restless_writer.kill()
    for number in range(5):
        with Store.open(tmp_path / f"{number}.db", read_only=True) as copy:
            steps, counts = np.unique(copy.measurements()["step"], return_counts=True)
        np.testing.assert_array_equal(counts, 500)
        np.testing.assert_array_equal(steps, np.arange(len(steps)))
        assert len(steps) >= 10 * (number + 1)
    back_up(path, tmp_path / "after.db")  # of what the killed writer left, its log unread by anyone
    with Store.open(tmp_path / "after.db", read_only=True) as copy, Store.open(path, read_only=True) as store:
        np.testing.assert_array_equal(copy.measurements(), store.measurements())


def test_a_killed_backup_leaves_no_backup_and_the_next_one_succeeds(path, tmp_path, block):
    with Store.open(path) as store:
        for number in range(10):
            store.record_measurements("f", "j", block(50_000, step=number))
            store.flush()
    copy = tmp_path / "copy.db"
    words = [sys.executable, "-m", "zerotune.tuner.cli", "store", "backup", str(copy), "--store", str(path)]
    with subprocess.Popen(words) as child:
        while not [*tmp_path.glob("copy.db.*")] and child.poll() is None:
            time.sleep(0.0005)
        child.send_signal(signal.SIGKILL)
    was_killed = not copy.exists()
    assert was_killed == bool([*tmp_path.glob("copy.db.*")])
    for half in tmp_path.glob("copy.db.*"):
        os.utime(half, (0, 0))  # long ago
    back_up(path, copy, may_overwrite=True)
    with sqlite3.connect(copy) as whole:
        assert whole.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert whole.execute("SELECT count(*) FROM measurements").fetchone() == (500_000,)
    assert files(tmp_path) == {"data", "copy.db"}
