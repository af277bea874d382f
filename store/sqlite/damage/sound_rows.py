"""The allowed values of each cell of the store, and views that show sound rows only.

All reads go through these views: a row with a damaged cell is missing from every query and join, so no reader needs
to expect one. Nothing is deleted. Only models are shown whatever their cells hold,
each with whether it is sound: people look for models by name.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ...records import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Algorithm,
    Collective,
    Outcome,
    Phase,
    Protocol,
    Source,
    Stage,
    TimingSource,
)
from ..rows.measurements import UNKNOWN, candidate_of
from ..rows.runnable import RUNNABLE_SQL

_log = logging.getLogger("zerotune.store")

# Comparisons also refuse other types: for SQLite, text and blobs exceed all numbers, and NULL compares with none.
_ID: Final = "{0} BETWEEN 1 AND 9223372036854775807"
_COUNT: Final = "{0} BETWEEN 0 AND 4294967295"
_DURATION_US: Final = "{0} BETWEEN 0 AND 1e300"
_PREDICTED_US: Final = "{0} BETWEEN 0 AND 9e999"
"""Infinity is allowed: a prediction may have no bound."""
_NUMBER: Final = "{0} BETWEEN -1e15 AND 1e15"
_TIME_S: Final = "{0} BETWEEN 0 AND 1e11"
"""Up to the year 5138."""
_TEXT: Final = "typeof({0}) = 'text'"


def _one_of(values: Iterable[int]) -> str:
    return "{0} IN (" + ",".join(str(int(value)) for value in values) + ")"


def _or_null(condition: str) -> str:
    return f"({{0}} IS NULL OR {condition})"


def _json(kind: str, *members: str) -> str:
    """SQL: is JSON of this kind, with members of these kinds. CASE, because JSON functions fail on other text."""
    of_members = f"(SELECT 1 FROM json_each({{0}}) WHERE type NOT IN ({','.join(repr(one) for one in members)}))"
    is_json = "typeof({0}) = 'text' AND json_valid({0})"
    return f"CASE WHEN {is_json} THEN json_type({{0}}) = '{kind}' AND NOT EXISTS {of_members} ELSE 0 END"


_CHECKSUM: Final = _or_null(_COUNT)
_CHUNK_BYTES: Final = f"({{0}} = 0 OR {{0}} BETWEEN {MIN_CHUNK_BYTES} AND {MAX_CHUNK_BYTES}) AND {{0}} % 1024 = 0"
"""Below 0: the row was found to be damaged."""
CELLS: Final[dict[str, dict[str, str]]] = {
    "fabrics": {
        "fabric_id": _TEXT,
        "description": _json("object", "text", "integer", "real", "true", "false"),
        "checksum": _CHECKSUM,
    },
    "jobs": {
        "job_id": _TEXT,
        "fabric": _or_null(_ID),
        "n_ranks": _COUNT,
        "stage": _one_of(Stage),
        "started_at_s": _TIME_S,
        "ended_at_s": _or_null(_TIME_S),
        "name": _TEXT,
        "is_lost": _one_of((0, 1)),
        "passages": _json("object", "array", "integer"),
        "lateness": _json("object", "array", "integer", "real"),
        "failure": _TEXT,
        "training": _TEXT,
        "environment": _TEXT,
        "checksum": _CHECKSUM,
    },
    "series": {
        "fabric": _ID,
        "n_ranks": _COUNT,
        "n_nodes": _COUNT,
        "message_bytes": "{0} BETWEEN 1 AND 4611686018427387904",
        "collective": _one_of(Collective),
        "phase": _one_of(Phase),
        "algorithm": _one_of((*Algorithm, UNKNOWN)),
        "protocol": _one_of((*Protocol, UNKNOWN)) + f" AND ({{0}} = {UNKNOWN} OR algorithm <> {UNKNOWN})",
        "n_channels": "{0} BETWEEN 0 AND 64",
        "is_default": _one_of((0, 1)),
        "source": _one_of(Source),
        "outcome": _one_of(Outcome),
        "timing_source": _one_of(TimingSource),
        "chunk_bytes": _CHUNK_BYTES,
        "checksum": _CHECKSUM,
    },
    # Not the series and the job that they belong to: a join finds none, and a million rows are a million comparisons.
    "measurements": {
        "epoch": _COUNT,
        "step": _COUNT,
        "duration_us": _DURATION_US,
        "memory_pressure": _or_null(_NUMBER),
        "measured_at_s": _TIME_S,
        "checksum": _CHECKSUM,
    },
    "steps": {
        "job": _ID,
        "step": _COUNT,
        "epoch": _COUNT,
        "duration_us": _DURATION_US,
        "exposed_us": _or_null(_NUMBER),
        "memory_pressure": _or_null(_NUMBER),
        "checksum": _CHECKSUM,
    },
    "decisions": {
        "job": _ID,
        "fabric": _ID,
        "n_ranks": _COUNT,
        "n_nodes": _COUNT,
        "collective": _one_of(Collective),
        "phase": _one_of(Phase),
        "size_class": "{0} BETWEEN 0 AND 250",
        "algorithm": _or_null(_one_of(Algorithm)),
        "protocol": _or_null(_one_of(Protocol)) + " AND ({0} IS NULL) = (algorithm IS NULL)",
        "n_channels": "{0} BETWEEN 0 AND 64",
        "chunk_bytes": _CHUNK_BYTES,
        "epoch": _COUNT,
        "kind": _TEXT,
        "reason": _TEXT,
        "predicted_us": _or_null(_PREDICTED_US),
        "predicted_low_us": _or_null(_PREDICTED_US),
        "predicted_high_us": _or_null(_PREDICTED_US),
        "baseline_us": _or_null(_PREDICTED_US),
        "n_measurements": _COUNT,
        "model_id": _TEXT,
        "decided_at_s": _TIME_S,
        "alternatives": _json("array", "object"),
        "step": _or_null(_COUNT),
        "checksum": _CHECKSUM,
    },
    "models": {
        "name": _TEXT,
        "fabric_id": _TEXT,
        "blob": "typeof({0}) = 'blob'",
        "versions": _json("object", "text"),
        "training_hash": _TEXT,
        "error": _or_null(_NUMBER),
        "created_at_s": _TIME_S,
    },
}
"""By table and column, the condition on a cell; columns that an older schema lacks are not checked."""

_NAMED_BY: Final = {"models": ("name", "fabric_id")}
"""Tables whose rows are shown if their names can be read."""

_JOINED: Final = ("fabrics", "jobs", "series")
"""Small tables that a million rows refer to: each query checks their rows once, not once per referring row."""

EVERY_SERIES: Final = "every_series"
"""View of all series; `series` leaves out those of which a plan named the chunk size, as to most readers a setting is
algorithm, protocol and channels."""

_CANNOT_RUN: Final = f"source = {int(Source.imported)} AND NOT {RUNNABLE_SQL}"
"""Condition on series: impossible settings that older versions of `zerotune store import` accepted."""

_logged: set[str] = set()


def show_sound_rows(connection: sqlite3.Connection) -> None:
    """Make the tables' names mean their sound rows, on this connection."""
    connection.text_factory = _text
    for table in CELLS:
        condition = _condition(connection, table, _NAMED_BY.get(table, tuple(CELLS[table])))
        if table == "series":
            condition = f"{condition} AND NOT ({_CANNOT_RUN})"
            knows_chunks = "chunk_bytes" in columns_of(connection, table)
            shown = "*" if knows_chunks else "*, 0 AS chunk_bytes"
            every = f"SELECT {shown} FROM main.series WHERE {_looked_up(table, condition)}"
            connection.execute(f"CREATE TEMP VIEW {EVERY_SERIES} AS {every}")
            condition += " AND chunk_bytes = 0" if knows_chunks else ""
        if table in _JOINED:
            condition = _looked_up(table, condition)
        is_sound = f", ifnull({_condition(connection, table, tuple(CELLS[table]))}, 0) AS is_sound"
        connection.execute(
            f"CREATE TEMP VIEW {table} AS SELECT *{is_sound if table in _NAMED_BY else ''} FROM main.{table}"
            f" WHERE {condition}"
        )


def _looked_up(table: str, condition: str) -> str:
    """SQL: the condition as one look for the rows that do not meet it."""
    return f"id NOT IN (SELECT id FROM main.{table} WHERE NOT ifnull({condition}, 0))"


def warn_of_damage(connection: sqlite3.Connection, path: Path, tables: Iterable[str] = tuple(CELLS)) -> None:
    """Log which rows are not read: one line for damaged cells, one for settings that NCCL cannot run.

    Each line is logged once in a process. The connection must have the views of sound rows.
    """
    damaged = []
    for table in tables:
        condition = _condition(connection, table, _NAMED_BY.get(table, tuple(CELLS[table])))
        (n_rows,) = connection.execute(f"SELECT count(*) FROM main.{table} WHERE NOT ifnull({condition}, 0)").fetchone()
        if n_rows:
            damaged.append(f"{n_rows:,} of {table}")
    if damaged:
        _warn(f"store {path} has rows with damaged cells, which are not used: {', '.join(damaged)}")
    if "series" in tables:
        _warn_of_series_that_cannot_run(connection, path)


def _warn_of_series_that_cannot_run(connection: sqlite3.Connection, path: Path) -> None:
    sound = _condition(connection, "series", tuple(CELLS["series"]))
    found = connection.execute(
        f"SELECT DISTINCT collective, algorithm, protocol FROM main.series WHERE {sound} AND {_CANNOT_RUN}"
    ).fetchall()
    if found:
        collective, algorithm, protocol = found[0]
        words = f"{len(found):,}, such as {Collective(collective).name} by {candidate_of(algorithm, protocol, 0)}"
        _warn(f"store {path} has imported measurements of settings that NCCL cannot run ({words}): they are not used")


def _warn(words: str) -> None:
    if words not in _logged:
        _logged.add(words)
        _log.warning("%s", words)


def sound_condition(connection: sqlite3.Connection, table: str) -> str:
    """SQL condition: every cell of a row is valid; only existing columns count."""
    return f"ifnull({_condition(connection, table, tuple(CELLS[table]))}, 0)"


def _condition(connection: sqlite3.Connection, table: str, columns: tuple[str, ...]) -> str:
    there = columns_of(connection, table)
    return " AND ".join(f"({CELLS[table][name].format(name)})" for name in columns if name in there)


def columns_of(connection: sqlite3.Connection, table: str, schema: str = "main") -> set[str]:
    """The columns that a table has; none if it is missing."""
    return {name for _, name, *_ in connection.execute(f"PRAGMA {schema}.table_info({table})")}


def _text(raw: bytes) -> str:
    """Damaged text is decoded with replacement characters: SQLite's own decoding would end the whole query."""
    return raw.decode(errors="replace")
