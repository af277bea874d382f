"""A store that cannot be written for a time, as on a full disk: what is recorded waits, and is then written."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.errors import StoreError
from zerotune.store.lockfile import LockFile
from zerotune.store.records import Stage
from zerotune.store.sqlite import database
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.opening import open_for_writing
from zerotune.tuner.offline.importing.command import import_measurements

FULL = "database or disk is full"
"""SQLite's words."""


writers: dict[Path, sqlite3.Connection] = {}
"""The connection that writes each store: SQLite bounds a file by connection."""


@pytest.fixture(autouse=True)
def keep_writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def opened(path: Path, **options: bool) -> tuple[sqlite3.Connection, LockFile, Path | None]:
        writers[path], *others = open_for_writing(path, **options)
        return writers[path], *others

    monkeypatch.setattr(database, "open_for_writing", opened)
    yield
    writers.clear()


def limit_pages(store: Store, n_more: int) -> None:
    """The file may grow by so many pages."""
    (n_pages,) = writers[store.path].execute("PRAGMA page_count").fetchone()
    writers[store.path].execute(f"PRAGMA max_page_count = {n_pages + n_more}")


def fill_disk(store: Store) -> None:
    """The file may not grow, and has no free page."""
    store.flush()
    writers[store.path].execute("VACUUM")
    limit_pages(store, 0)


@contextmanager
def full_disk(store: Store) -> Iterator[None]:
    fill_disk(store)
    yield
    limit_pages(store, 1_000_000)


def said(caplog) -> list[str]:
    """Levels of what is logged: an error when it begins, a warning when it is over."""
    return [record.levelname for record in caplog.records]


def test_records_of_a_full_disk_are_written_once_it_has_room(store, block, caplog):
    for n_outages in (1, 2):
        with full_disk(store):
            store.record_job(f"j{n_outages}", "f", {"gpu": "x" * 5000}, 2)
            for number in range(2):
                store.record_measurements("f", f"j{n_outages}", block(2000, step=number))
                assert not store.flush(), "known at once"
            state = store.writing
            assert (state.is_out, state.error, state.n_lost) == (True, FULL, 0)
            assert 2000 <= state.n_waiting <= 4001
        assert store.flush()
        assert len(store.measurements(job_id=f"j{n_outages}")) == 4000
        job = store.jobs()[-1]
        assert (job.job_id, job.n_ranks, job.fabric_id) == (f"j{n_outages}", 2, "f")
        assert job.started_at_s > 0
        assert (store.writing.is_out, store.n_dropped) == (False, 0)
        assert said(caplog) == n_outages * ["ERROR", "WARNING"]
        assert FULL in caplog.records[0].getMessage()


def test_an_import_that_finds_no_room_says_so_and_goes_on_later(tmp_path, monkeypatch):
    rows = "".join(f"allgather,{1024 * size},ring,simple,{size % 16 + 1},2,16,50\n" for size in range(1, 4001))
    (tmp_path / "table.csv").write_text(
        "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,latency_us\n" + rows
    )
    said = {"fabric_id": None, "setting": None, "is_default": False, "n_nodes": None, "dry_run": False}
    import_it = partial(import_measurements, tmp_path / "table.csv", tmp_path / "store.db", **said)
    opened = Store.open

    def on_a_full_disk(*args, **kwargs):
        store = opened(*args, **kwargs)
        fill_disk(store)
        return store

    with monkeypatch.context() as patch:
        patch.setattr(Store, "open", on_a_full_disk)
        with pytest.raises(StoreError, match=rf"store\.db.*{FULL}"):
            import_it()
    assert import_it()[1] == 4000
    assert import_it()[1] == 0


def test_records_without_room_in_memory_are_lost_but_jobs_are_kept(store, block, monkeypatch, caplog):
    monkeypatch.setattr("zerotune.store.sqlite.writing.writer.MAX_PENDING_ROWS", 3000)
    with full_disk(store):
        store.record_measurements("f", "j", block(3000))
        store.flush()
        for _ in range(2):
            store.record_measurements("f", "j", block(2000))
        store.record_job("j", "f", {}, 2)
        store.update_job("j", stage=Stage.zero3)
        state = store.writing
        assert (state.n_lost, state.is_out) == (4000, True)
    assert store.flush()
    assert (len(store.measurements()), store.n_dropped, store.writing.is_out) == (3000, 4000, False)
    assert [(job.n_ranks, job.stage) for job in store.jobs()] == [(2, Stage.zero3)]
    assert said(caplog) == ["ERROR", "ERROR", "WARNING"], "it waits, it is lost, it is written again"
    assert " 4,000 " in caplog.messages[-1]


def test_as_much_as_fits_is_written_in_order_while_a_disk_fills(store, block):
    with full_disk(store):
        store.record_job("j", "f", {}, 2)
        for number in range(64):
            store.record_measurements("f", "j", block(100, step=number))
        store.flush()
        limit_pages(store, 20)
        assert not store.flush()
        time.sleep(0.3)  # a try may have begun meanwhile; the next comes after a second
        steps = np.unique(store.measurements()["step"])
        assert 1 < len(steps) < 64
        np.testing.assert_array_equal(steps, np.arange(len(steps)))
        assert store.writing.n_waiting == 100 * (64 - len(steps))
    assert store.flush()
    assert len(store.measurements()) == 6400


def test_records_waiting_at_the_close_are_said_to_be_lost(store, block, caplog):
    fill_disk(store)
    store.record_measurements("f", "j", block(2000))
    store.flush()
    store.close()
    assert store.n_dropped == 2000
    assert said(caplog) == ["ERROR", "ERROR"]
    assert FULL in caplog.messages[-1]


def test_a_file_that_was_removed_or_replaced_is_noticed(store, block):
    store.record_measurements("f", "j", block(2))
    store.flush()
    assert not store.writing.is_gone
    store.path.rename(store.path.with_name("elsewhere"))
    assert store.writing.is_gone
    store.path.write_text("another file")
    assert store.writing.is_gone
    store.path.with_name("elsewhere").rename(store.path)
    assert not store.writing.is_gone
