"""What was recorded is never overwritten by what a command writes."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from zerotune.store.errors import UserError
from zerotune.tuner.cli.paths import output_file


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "store.csv"
    with closing(sqlite3.connect(path)) as made:
        made.execute("CREATE TABLE kept (value)")
        made.commit()
    return path


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal", ".lock"])
def test_a_store_and_what_lies_beside_it(database: Path, suffix: str) -> None:
    with pytest.raises(UserError):
        output_file(database.with_name(database.name + suffix))


def test_a_link_to_a_store(database: Path, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(database)
    with pytest.raises(UserError):
        output_file(tmp_path / "link.json")


def test_a_trace_that_was_recorded(tmp_path: Path) -> None:
    recorded = tmp_path / "job.rank00000.zttrace"
    recorded.write_bytes(b"anything")
    with pytest.raises(UserError):
        output_file(recorded)


def test_a_backup_may_take_the_place_of_an_older_one_and_other_files_of_themselves(
    database: Path, tmp_path: Path
) -> None:
    assert output_file(database, over_database=True) == database
    with pytest.raises(UserError):
        output_file(database.with_name(database.name + "-wal"), over_database=True)
    for name in ("new.json", "old.csv", "notes-wal"):
        (tmp_path / name).write_text("{}")
        assert output_file(tmp_path / name) == tmp_path / name
