"""Damage that SQLite does not notice: a cell that holds what it cannot, a table or a column that is gone."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.errors import StoreError
from zerotune.store.records import (
    BASELINE,
    Candidate,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    ModelRecord,
    Phase,
    StepRecord,
)
from zerotune.store.sqlite.damage.sound_rows import CELLS
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.migrations import columns_without
from zerotune.tuner.modeling.statistics import statistics

COLUMNS = [(table, column) for table, cells in CELLS.items() for column in cells]
DAMAGE = {"text": "'{nope'", "negative": "-1e300", "bytes": "x'fffe'", "null": "NULL"}
KEY = DecisionKey(CommunicatorClass(8, 1), Collective.all_gather, Phase.other, 80)


@pytest.fixture
def filled(sound: Path, path: Path) -> Path:
    """A copy that may be damaged."""
    path.parent.mkdir()
    return Path(shutil.copy(sound, path))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, block) -> Path:
    """Two jobs on two fabrics, each with one of everything."""
    path = tmp_path_factory.mktemp("sound") / "store.db"
    with Store.open(path) as store:
        for number in (1, 2):
            job, fabric = f"job{number}", f"fabric{number}"
            store.record_job(job, fabric, {"gpu": "H100", "n_gpus": 8}, 8)
            store.record_measurements(fabric, job, block(3))
            store.record_steps(job, [StepRecord(number, 1, 100.0, 10.0, 0.5)])
            store.record_decisions([Decision(job, fabric, KEY, BASELINE, 1, "keep", "so", 1.0, 1.0, 1.0, 1.0, step=7)])
            store.save_model(ModelRecord("kriging", fabric, b"blob", {"model": "kriging"}, "hash", 0.1, 100.0))
    return path


def damage(path: Path, table: str, column: str, value: str) -> bool:
    """Put `value` into this column of the table's newest row; False where the schema itself refuses it."""
    row = "job" if table == "steps" else "rowid"
    with closing(sqlite3.connect(path)) as connection, connection:
        try:
            newest = f"{row} = (SELECT max({row}) FROM {table})"
            if "checksum" in CELLS[table]:  # with it, other possible values are noticed, too
                connection.execute(f"UPDATE {table} SET checksum = NULL WHERE {newest}")
            connection.execute(f"UPDATE {table} SET {column} = {value} WHERE {newest}")
        except sqlite3.IntegrityError:
            return False
    return True


def read_all(store: Store) -> dict[str, int]:
    """How many rows each reading call gives."""
    jobs = [job.job_id for job in store.jobs()]
    return {
        "fabrics": len(store.fabrics()),
        "jobs": len(jobs),
        "measurements": len(store.measurements()),
        "measured": len(store.measured()),
        "statistics": sum(len(statistics(store, fabric)) for fabric in ("fabric1", "fabric2")),
        "steps": sum(len(store.steps(job)) for job in ("job1", "job2")),
        "decisions": len(store.decisions()),
        "models": len([model for model in store.models() if not model.is_damaged]),
    }


SELDOM = ("negative", "bytes", "null")
VALUES = [pytest.param(value, marks=[pytest.mark.slow] if kind in SELDOM else []) for kind, value in DAMAGE.items()]


@pytest.mark.parametrize("value", VALUES, ids=DAMAGE)
@pytest.mark.parametrize(("table", "column"), COLUMNS, ids=[".".join(one) for one in COLUMNS])
def test_a_damaged_cell_costs_its_row_and_nothing_else(filled, caplog, table, column, value):
    with Store.open(filled, read_only=True) as store:
        whole = read_all(store)
    if not damage(filled, table, column, value):
        return
    with Store.open(filled, read_only=True) as store:
        left = read_all(store)
    assert all(whole[name] - left[name] in (0, 1, 3) for name in whole)
    assert left["models"] >= 1
    assert left["jobs"] >= 1
    assert left["fabrics"] >= 1
    with Store.open(filled) as store:  # the daemon begins
        assert store.set_aside is None
        store.record_steps("job3", [StepRecord(1, 1, 100.0)])
        store.flush()
        assert len(store.steps("job3")) == 1
        assert read_all(store) == left | {"jobs": left["jobs"] + 1}


def test_the_reader_shows_every_extreme_that_the_writer_takes(path, block):
    """Extremes that are no damage."""
    extreme = {"n_ranks": 2**32 - 1, "message_bytes": 2**62 - 1, "step": 2**32 - 1, "memory_pressure": np.nan,
               "n_channels": 64, "algorithm": 255, "protocol": 255}  # fmt: skip
    never = Candidate(n_channels=4)
    with Store.open(path) as store:
        store.record_job("", "", {}, 0)
        store.record_measurements("", "", block(3, **extreme))
        store.record_steps("", [StepRecord(0, 0, 0.0, -1e-9, None)])
        store.record_decisions([Decision("", "", KEY, never, 0, "", "", predicted_high_us=float("inf"))])
        store.save_model(ModelRecord("", "", b"", {}, "", None, 0.0))
        store.flush()
        counts = [len(store.measurements()), len(store.steps("")), len(store.decisions()), len(store.jobs())]
        assert counts == [3, 1, 1, 1]
        assert not store.models()[0].is_damaged


def test_bytes_that_are_no_text_do_not_end_a_query(filled):
    damage(filled, "decisions", "reason", "CAST(x'41ff42' AS TEXT)")
    with Store.open(filled, read_only=True) as store:
        assert [one.reason for one in store.decisions()] == ["so", "A\N{REPLACEMENT CHARACTER}B"]


@pytest.mark.parametrize("column", ["versions", "blob", "training_hash", "error", "created_at_s"])
def test_of_a_model_with_a_damaged_cell_the_name_is_known(filled, column):
    damage(filled, "models", column, "'{nope'" if column != "training_hash" else "x'fffe'")
    with Store.open(filled) as store:
        damaged = store.load_model("kriging", "fabric2")
        assert damaged is not None
        assert damaged.is_damaged
        assert damaged.versions == {}
        assert damaged.blob == b""
        store.rename_model("kriging", "fabric2", "kriging.damaged")
        store.flush()
        assert store.load_model("kriging", "fabric2") is None
    with closing(sqlite3.connect(filled)) as connection:
        (kept,) = connection.execute(f"SELECT {column} FROM models WHERE name = 'kriging.damaged'").fetchone()
    assert kept in ("{nope", b"\xff\xfe"), "its cells are as they were found"


def holes() -> Iterator[tuple[str, str]]:
    for table, columns in columns_without(frozenset()).items():
        yield f"table {table}", f"DROP TABLE {table}"
        plain = next(iter(sorted(columns & {"description", "ended_at_s", "memory_pressure", "reason", "blob"})), None)
        if plain:
            yield f"column {plain} of table {table}", f"ALTER TABLE {table} DROP COLUMN {plain}"
    yield "none of the schema steps", "DROP TABLE _sqlite_migrations"
    yield "column name of table _sqlite_migrations", "ALTER TABLE _sqlite_migrations RENAME COLUMN name TO other"


@pytest.mark.parametrize(("lost", "statement"), [*holes()], ids=[lost for lost, _ in holes()])
def test_a_store_that_lacks_a_part_is_set_aside_by_the_writer_and_refused_by_readers(filled, caplog, lost, statement):
    with closing(sqlite3.connect(filled)) as connection, connection:
        connection.execute(statement)
    before = filled.read_bytes()
    with pytest.raises(StoreError, match=f"is damaged: .*{lost}.*; `.* repair ") as refused:
        Store.open(filled, read_only=True)
    assert "\n" not in str(refused.value)
    assert filled.read_bytes() == before
    with Store.open(filled) as store:  # the remedy
        assert store.set_aside is not None
        assert store.set_aside.read_bytes() == before
        store.record_steps("job", [StepRecord(1, 1, 100.0)])
        store.flush()
        assert len(store.steps("job")) == 1
    assert lost in caplog.text
