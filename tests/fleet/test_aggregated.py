"""A book of units that another engine made is the book of the objects themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.lib.fleet.fleet_objects import object_of
from benchmarks.lib.fleet.fleet_rows import signer_of
from zerotune.store.errors import UserError

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
import duckdb

from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.merging import UNITS
from zerotune.tuner.fleet.storage import Storage

N_NODES, N_ROWS = 12, 2000


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("fleet")
    for at in range(N_NODES):
        Storage(str(url), writes=True).put(*object_of(at, N_ROWS))
    return url


def aggregate(fleet: Path, units: Path, change: str = "* REPLACE (block AS block)") -> Path:
    """What the query gives, in two files."""
    units.mkdir()
    (units / "_SUCCESS").touch()
    with duckdb.connect() as connection:
        connection.execute(f"CREATE VIEW measurements AS FROM read_parquet('{fleet}/v1/*/*/*.parquet')")
        connection.execute(f"CREATE TABLE units AS SELECT {change} FROM ({UNITS.format(rows='measurements')})")
        for half in (0, 1):
            file = units / f"part-{half}.parquet"
            connection.execute(f"COPY (FROM units WHERE hash(job_id) % 2 = {half}) TO '{file}' (FORMAT parquet)")
    return units


def test_it_is_the_same_book(fleet: Path, tmp_path: Path) -> None:
    units = aggregate(fleet, tmp_path / "units")
    expected = build(str(fleet), tmp_path / "one").book
    found = build(str(fleet), tmp_path / "other", aggregated=str(units)).book
    assert found.cells == expected.cells
    assert any(one.is_winner for one in found.cells)
    claimed = tuple(replace(one, name=one.key, key="") for one in expected.contributors)
    assert (found.contributors, found.fabrics) == (claimed, expected.fabrics), "an engine checks no signature"
    assert (found.head.n_rows, found.head.n_jobs) == (N_NODES * N_ROWS, N_NODES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "one.merged", "other", "units"]


def test_units_that_cannot_be_are_counted(fleet: Path, tmp_path: Path) -> None:
    key = signer_of("node3").public_hex
    change = f"* REPLACE (if(contributor = '{key}', 'nan'::DOUBLE, log_us) AS log_us)"
    book = build(str(fleet), tmp_path / "book", aggregated=str(aggregate(fleet, tmp_path / "units", change))).book
    refused = {one.name for one in book.contributors if one.n_refused_rows}
    assert refused == {key}
    assert book.head.n_jobs == N_NODES - 1


@pytest.mark.parametrize(
    "change",
    ["* EXCLUDE (spread)", "* REPLACE (n_channels * 100000 AS n_channels)", "* REPLACE ('x' AS block)"],
)
def test_what_the_query_does_not_give_is_refused(fleet: Path, tmp_path: Path, change: str) -> None:
    units = aggregate(fleet, tmp_path / "units", change)
    with pytest.raises(UserError, match="part-0"):
        build(str(fleet), tmp_path / "book", aggregated=str(units))
    assert not (tmp_path / "book").exists()
