"""The query that makes units of rows is one text for DuckDB and Spark, and the page shows it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.fleet.fleet_rows import FACTS, measured

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("sqlglot")
import duckdb
import sqlglot

from zerotune.tuner.fleet.merging import UNITS
from zerotune.tuner.fleet.objects import Fabric, pack, unpack

QUERY = UNITS.format(rows="measurements")


def test_spark_reads_the_query_as_duckdb_does() -> None:
    block = measured(200)
    block["duration_us"][::7] = np.nan
    block["n_channels"][1::11] = 200
    packed = pack("node", Fabric("fabric", FACTS), ["job"], np.zeros(len(block), int), block, 1, None)
    measurements = unpack(*packed).rows
    as_spark = sqlglot.parse_one(QUERY, read="spark", error_level=sqlglot.ErrorLevel.RAISE)
    with duckdb.connect() as connection:
        connection.register("measurements", measurements)
        as_it_is, through_spark = (
            sorted(connection.execute(text).fetchall()) for text in (QUERY, as_spark.sql(dialect="duckdb"))
        )
    assert as_it_is == through_spark
    assert 0 < sum(unit[15] for unit in as_it_is) < len(block), "what cannot be does not count"
