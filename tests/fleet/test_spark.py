"""The page's query in a real Spark (opt-in: `pip install 'zerotune[spark]'`, and Java 17), beside DuckDB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.fleet.fleet_objects import object_of

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
import duckdb
import numpy as np

from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.merging import UNITS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java"),
]

N_OBJECTS, N_ROWS = 2000, 60
QUERY = UNITS.format(rows="measurements")
SPARK = """
import sys
from pyspark.sql import SparkSession

url, out, query = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.sql.shuffle.partitions", "4").getOrCreate()
spark.read.parquet(url).createOrReplaceTempView("measurements")
spark.sql(query).write.parquet(out)
spark.stop()
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("fleet")
    for at in range(N_OBJECTS):
        path, data = object_of(at, N_ROWS)
        (url / path).parent.mkdir(parents=True, exist_ok=True)
        (url / path).write_bytes(data)  # without waiting for the disk, as the writer would
    return url


@pytest.fixture(scope="module")
def units(fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Spark makes of the objects."""
    out = tmp_path_factory.mktemp("spark") / "units"
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    command = [sys.executable, "-c", SPARK, str(fleet / "v1"), str(out), QUERY]
    subprocess.run(command, check=True, env=environment, timeout=600, capture_output=True, cwd=out.parent)
    return out


def test_spark_gives_the_units_that_duckdb_gives(fleet: Path, units: Path) -> None:
    with duckdb.connect() as connection:
        connection.execute(f"CREATE VIEW measurements AS FROM read_parquet('{fleet}/v1/*/*/*.parquet')")
        of_duckdb = connection.execute(f"FROM ({QUERY}) ORDER BY ALL").fetchall()
        names = [column[0] for column in connection.description or ()]
        of_spark = connection.execute(
            f"SELECT {', '.join(names)} FROM read_parquet('{units}/*.parquet') ORDER BY ALL"
        ).fetchall()
    assert len(of_duckdb) > N_OBJECTS
    assert [unit[:16] for unit in of_spark] == [unit[:16] for unit in of_duckdb]
    floats = [np.array([unit[16:] for unit in of], np.float64) for of in (of_spark, of_duckdb)]
    np.testing.assert_allclose(floats[0], floats[1], rtol=0, atol=1e-9)


def test_their_books_are_one(fleet: Path, units: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zerotune.tuner.cli", "book", "build", str(fleet), "--aggregated", str(units)]
    subprocess.run([*command, "--out", str(tmp_path / "other")], check=True, capture_output=True, timeout=300)
    from zerotune.tuner.fleet.reading import read_book

    expected, found = build(str(fleet), tmp_path / "one").book, read_book(str(tmp_path / "other"))
    assert any(one.is_winner for one in expected.cells)
    assert found.fabrics == expected.fabrics
    assert [(one.key, one.candidate, one.n_calls, one.is_winner) for one in found.cells] == [
        (one.key, one.candidate, one.n_calls, one.is_winner) for one in expected.cells
    ]
    for name in ("median_us", "spread", "gain", "gain_std"):
        numbers = [np.array([getattr(one, name) for one in of.cells], np.float64) for of in (found, expected)]
        np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-4, atol=1e-5)
