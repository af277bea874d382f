"""One call to the system, or for memory, fails: what is refused frees its lock, what is recorded is not lost."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from zerotune.store.errors import StoreError
from zerotune.store.sqlite import database, opening, soundness
from zerotune.store.sqlite.damage.recovery import recover
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.migrations import migrate
from zerotune.store.sqlite.rows import measurements

N_ROWS = 4000


class Once:
    """Stands in for a function, of which one call raises."""

    def __init__(self, real, error: BaseException, at: int = 1) -> None:
        self._real, self._error, self._left = real, error, at

    def __call__(self, *args, **kwargs):
        self._left -= 1
        if not self._left:
            raise self._error
        return self._real(*args, **kwargs)


class Statement:
    """A statement that fails once, on whatever connection it comes after `arm`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begin, self._error = "", BaseException()
        connect = sqlite3.connect

        class Failing(sqlite3.Connection):
            def execute(connection, sql, *values):
                if self._begin and sql.startswith(self._begin):
                    self._begin = ""
                    raise self._error
                return super().execute(sql, *values)

        monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=Failing))

    def arm(self, begin: str, error: BaseException) -> None:
        """The next statement that begins so fails."""
        self._begin, self._error = begin, error

    @property
    def has_failed(self) -> bool:
        return not self._begin


@pytest.fixture
def statement(monkeypatch: pytest.MonkeyPatch) -> Statement:
    return Statement(monkeypatch)


def io_error() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = 10
    return error


@pytest.fixture
def written(path: Path, block) -> Path:
    with Store.open(path) as store:
        store.record_job("j", "f", {}, 8)
        store.record_measurements("f", "j", block(N_ROWS))
    return path


@pytest.mark.parametrize("error", [MemoryError(), io_error()], ids=["memory", "disk"])
@pytest.mark.parametrize(("module", "name"), [(database, "reader"), (opening, "check_pages")])
def test_an_opening_that_fails_is_refused_and_the_next_one_is_not(written, monkeypatch, module, name, error):
    with monkeypatch.context() as patched:
        patched.setattr(module, name, Once(getattr(module, name), error))
        with pytest.raises(StoreError):
            Store.open(written)
    with Store.open(written) as store:
        assert (len(store.measurements()), store.set_aside) == (N_ROWS, None)


def test_a_file_that_can_only_be_read_is_refused_by_the_writer(written, monkeypatch):
    """SQLite opens so what it cannot open for writing at that moment; nothing would ever be written."""
    connect = sqlite3.connect

    def for_reading(path, **options):
        return connect(f"file:{path}?mode=ro", **{**options, "uri": True})

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", for_reading)
        with pytest.raises(StoreError):
            Store.open(written)
    with Store.open(written) as store:
        assert len(store.measurements()) == N_ROWS


@pytest.mark.parametrize("begin", ["ROLLBACK", "BEGIN", "COMMIT", "PRAGMA busy_timeout =", "PRAGMA wal_checkpoint"])
@pytest.mark.parametrize("error", [MemoryError(), io_error()], ids=["memory", "disk"])
def test_the_writer_lives_on_whatever_statement_fails(path, block, monkeypatch, statement, begin, error):
    monkeypatch.setattr("zerotune.store.sqlite.writing.writer.RETRY_S", 0.01)
    monkeypatch.setattr("zerotune.store.sqlite.writing.writer.IDLE_S", 0.01)
    with Store.open(path) as store:
        statement.arm(begin, error)
        monkeypatch.setattr(measurements, "insert", Once(measurements.insert, MemoryError()))  # undone by ROLLBACK
        for number in range(3):
            store.record_measurements("f", "j", block(10, step=number))
            assert any(store.flush() for _ in range(5))
        assert (len(store.measurements()), store.n_dropped) == (30, 0)
    assert statement.has_failed


def test_commit_tells_of_records_that_sqlite_refused(path, block, monkeypatch):
    with Store.open(path) as store:
        monkeypatch.setattr(measurements, "insert", Once(measurements.insert, sqlite3.IntegrityError("no such")))
        store.record_measurements("f", "j", block(10))
        with pytest.raises(StoreError):
            store.commit()
        store.record_measurements("f", "j", block(10))
        store.commit()
        assert (len(store.measurements()), store.n_dropped) == (10, 10)


@pytest.fixture
def n_sound(written) -> int:
    """Measurements that are left in a store with a damaged page."""
    with written.open("r+b") as file:
        file.seek(20 * 4096)
        file.write(b"\xa5" * 4096)
    n_sound = soundness.check(written).tables["measurements"].n_sound
    assert N_ROWS - 200 < n_sound < N_ROWS
    return n_sound


@pytest.mark.parametrize("begin", ["SELECT 1 FROM main.sqlite_m", "PRAGMA main.table_info(meas", "SELECT n_rows"])
def test_a_read_that_fails_once_is_no_damage_to_a_recovery(written, n_sound, statement, begin):
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as target:
        migrate(target)
        statement.arm(begin, io_error())
        found = recover(written, target)
    assert statement.has_failed
    assert found.tables["measurements"] == (N_ROWS, n_sound)


def test_a_new_file_whose_log_cannot_be_copied_does_not_take_the_damaged_ones_place(written, n_sound, statement):
    statement.arm("PRAGMA wal_checkpoint", io_error())
    with pytest.raises(StoreError):
        soundness.repair(written)
    assert statement.has_failed
    assert soundness.repair(written).found.tables["measurements"].n_sound == n_sound
    assert len([one for one in written.parent.iterdir() if "corrupt" in one.name and one.name[-1].isdigit()]) == 1
