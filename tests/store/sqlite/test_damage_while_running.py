"""A file that is damaged while it is written: it is kept, said to be damaged, and what comes goes into a new one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.atomic_file import sync_folder
from zerotune.store.records import StepRecord
from zerotune.store.sqlite.damage import damage, replacement
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.writing import recent

PAGE_BYTES = 4096


def overwrite(path: Path, first: int, n_pages: int) -> None:
    """Put other bytes in the place of pages, counted from 0."""
    with path.open("r+b") as file:
        file.seek(first * PAGE_BYTES)
        file.write(b"\xa5" * (n_pages * PAGE_BYTES))


def fill(store: Store, block, steps: range) -> None:
    """200 measurements a step, committed, and copied into the file."""
    for step in steps:
        store.record_measurements("f", "j", block(200, step=step))
    assert store.flush()


@pytest.fixture(autouse=True)
def looks_are_not_seldom_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damage, "MOST_OF_TIME", 1.0)


@pytest.fixture
def written(path: Path, block) -> Path:
    with Store.open(path) as store:
        store.record_job("j", "f", {}, 8)
        fill(store, block, range(50))
    return path


def wait_for_damage(store: Store) -> None:
    deadline_s = time.monotonic() + 20
    while not store.writing.damage and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert store.writing.damage


@pytest.mark.parametrize("is_noticed_late", [False, True])
def test_records_after_damage_go_to_a_new_file(
    written, block, caplog, monkeypatch, is_noticed_late
):
    monkeypatch.setattr(damage, "EVERY_S", 1.0 if is_noticed_late else 0.05)
    with Store.open(written) as store:
        overwrite(written, 20, written.stat().st_size // PAGE_BYTES - 20)  # most of the measurements
        for step in range(100, 150):
            fill(store, block, range(step, step + 1))
        wait_for_damage(store)
        state = store.writing
        assert state.damage
        assert Path(state.set_aside).exists()
        assert (state.is_out, state.is_gone, state.n_lost) == (False, False, 0)
        steps, counts = np.unique(store.measurements()["step"], return_counts=True)
        np.testing.assert_array_equal(steps[steps >= 100], np.arange(100, 150))
        np.testing.assert_array_equal(counts[steps >= 100], 200)
        assert state.n_recovered >= (steps < 100).sum()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert state.set_aside in caplog.messages[0]
    with Store.open(written) as store:
        assert store.set_aside is None, "the new file is sound"
        assert (store.measurements()["step"] >= 100).sum() == 50 * 200


def test_damage_is_noticed_though_nothing_fails(written, block, monkeypatch):
    monkeypatch.setattr(damage, "EVERY_S", 0.05)
    with Store.open(written) as store:
        overwrite(written, 20, 2)  # pages of old measurements, which the writer never reads
        wait_for_damage(store)
        assert 0 < (store.writing.n_missing or 0) < 400, "two pages of 50"
        assert store.writing.n_recovered + (store.writing.n_missing or 0) == 50 * 200
        fill(store, block, range(100, 110))
        assert (store.measurements()["step"] >= 100).sum() == 10 * 200


def test_a_damaged_file_is_not_said_to_be_removed_while_another_takes_its_place(written, monkeypatch):
    monkeypatch.setattr(damage, "EVERY_S", 0.05)
    seen = set()
    with Store.open(written) as store:

        def look(folder: Path) -> None:
            seen.add((written.exists(), store.writing.is_gone))
            sync_folder(folder)

        monkeypatch.setattr(replacement, "sync_folder", look)
        overwrite(written, 20, 2)
        wait_for_damage(store)
        assert (False, False) in seen, "there was a moment without a file"
        assert not any(is_gone for _, is_gone in seen)
        written.unlink()
        assert store.writing.is_gone, "by others than this process"


def test_rows_wait_while_there_is_no_room_for_a_new_file(written, block, monkeypatch):
    monkeypatch.setattr(damage, "EVERY_S", 0.05)
    with Store.open(written) as store:
        assert store.flush()
        with monkeypatch.context() as patch:
            patch.setattr("zerotune.store.sqlite.opening.recover", no_room)
            overwrite(written, 1, written.stat().st_size // PAGE_BYTES - 1)
            time.sleep(0.3)
            store.record_measurements("f", "j", block(200, step=100))
            assert not store.flush()
            assert not store.flush()
            assert (store.writing.is_out, store.writing.n_waiting, store.n_dropped) == (True, 200, 0)
            assert not list(written.parent.glob("*.corrupt-*")), "all is as it was"
        assert store.flush()
        assert (store.measurements()["step"] == 100).sum() == 200
        assert not store.writing.is_out


def wait_until_copied(path: Path) -> None:
    """SQLite's log is empty: all is in the file."""
    log, deadline_s = path.with_name(path.name + "-wal"), time.monotonic() + 20
    while log.stat().st_size and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not log.stat().st_size


@pytest.mark.parametrize("first_page", [0, 1, 20])
@pytest.mark.parametrize("most_rows", [100_000, 1000])
def test_records_since_the_last_check_are_written_again(written, block, monkeypatch, first_page, most_rows):
    monkeypatch.setattr(recent, "MOST_ROWS", most_rows)
    monkeypatch.setattr("zerotune.store.sqlite.writing.writer.IDLE_S", 0.01)
    may_look = threading.Event()
    monkeypatch.setattr(damage.DamageWatch, "due_in_s", property(lambda _: 0.0 if may_look.is_set() else 60.0))
    with Store.open(written) as store:
        for step in range(100, 150):
            store.record_steps("j", [StepRecord(step, 1, 100.0)])
            fill(store, block, range(step, step + 1))
        wait_until_copied(written)
        overwrite(written, first_page, written.stat().st_size // PAGE_BYTES - first_page)
        may_look.set()
        fill(store, block, range(150, 151))
        assert store.writing.damage
        steps, counts = np.unique(store.measurements()["step"], return_counts=True)
        oldest = 100 if most_rows == 100_000 else 147
        np.testing.assert_array_equal(steps[steps >= oldest], np.arange(oldest, 151))
        np.testing.assert_array_equal(counts[steps >= oldest], 200)
        assert [step.step for step in store.steps("j")][-3:] == [147, 148, 149]
        assert store.writing.n_recovered == len(store.measurements()) - 200
        assert store.writing.n_missing in (None, 100 * 200 - store.writing.n_recovered)


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")
