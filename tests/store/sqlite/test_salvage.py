"""A damaged file: what is sound of it is in the new one, and what is not is counted."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.records import StepRecord
from zerotune.store.sqlite.database import Store

PAGE_BYTES = 4096
N_ROWS = 5000
MOST_OF_A_PAGE = 200
"""More measurements than a page holds."""


@pytest.fixture
def written(path: Path, block) -> Path:
    with Store.open(path) as store:
        store.record_job("j", "f", {"gpu": "H100"}, 8)
        store.record_steps("j", [StepRecord(step, 1, 100.0) for step in range(500)])
        store.record_measurements("f", "j", block(N_ROWS, message_bytes=np.arange(N_ROWS) % 300 + 1))
    return path


def test_one_damaged_page_costs_no_more_than_what_is_on_it(written):
    whole = written.read_bytes()
    n_set_aside = 0
    for at in range(0, len(whole), PAGE_BYTES * 13):
        written.write_bytes(whole[:at] + bytes([0xA5]) * PAGE_BYTES + whole[at + PAGE_BYTES :])
        with Store.open(written) as store:
            state = store.writing
            n_set_aside += bool(state.set_aside)
            assert len(store.measurements()) >= N_ROWS - MOST_OF_A_PAGE, at
            if state.set_aside:
                assert len(store.measurements()) == state.n_recovered
                assert state.n_missing in (None, N_ROWS - state.n_recovered)
    assert n_set_aside > 3


def test_leaves_around_damaged_ones_are_read(written):
    with closing(sqlite3.connect(written)) as connection:
        query = "SELECT pageno FROM dbstat WHERE name = 'measurements' AND pagetype = 'leaf'"
        try:
            leaves = [number for (number,) in connection.execute(query)]
        except sqlite3.OperationalError:
            pytest.skip("this SQLite cannot say where its pages are")
    with written.open("r+b") as file:
        for number in (leaves[3], leaves[7]):
            file.seek((number - 1) * PAGE_BYTES)
            file.write(b"\xa5" * PAGE_BYTES)
    with Store.open(written) as store:
        assert N_ROWS - 2 * MOST_OF_A_PAGE <= store.writing.n_recovered < N_ROWS
        assert store.writing.n_recovered + (store.writing.n_missing or 0) == N_ROWS
        assert len(store.steps("j")) == 500


@pytest.mark.parametrize("column", ["duration_us", "step", "series", "measured_at_s"])
def test_a_possible_value_that_was_not_written_is_not_used(written, caplog, column):
    with closing(sqlite3.connect(written)) as connection, connection:
        connection.execute(f"UPDATE measurements SET {column} = {column} + 1 WHERE id = 77")
    for _ in range(2):
        with Store.open(written) as store:
            assert len(store.measurements()) == N_ROWS - 1
            assert store.set_aside is None
    assert "1 of measurements" in caplog.text
