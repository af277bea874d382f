"""The store's schema, as append-only steps.

Never edit or remove a step that was released: add one. A store that names a step unknown here was
written by a newer zerotune.

A *series* is everything that distinguishes measurements: fabric, communicator class,
collective, phase, message_bytes, candidate and provenance. Training repeats the same few hundred,
so a measurement row is a handful of integers that point to one. Measurements carry no index: reading
all of them takes less time than maintaining an index would.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sqlite_utils import Database

APPLICATION_ID: Final = 0x5A54554E
"""SQLite's application_id of every store ("ZTUN")."""

MIGRATIONS_TABLE: Final = "_sqlite_migrations"
"""Table in which sqlite_utils records a file's schema steps."""
_SET: Final = "zerotune"

Step = Callable[["sqlite3.Connection | Database"], None]
_STEPS: Final[dict[str, Step]] = {}


def _step(step: Step) -> Step:
    _STEPS[step.__name__] = step
    return step


@_step
def m001_first_schema(db: sqlite3.Connection | Database) -> None:
    """Fabrics, jobs, series with their measurements, steps, decisions, models."""
    statements = (
        """CREATE TABLE fabrics (
            id INTEGER PRIMARY KEY, fabric_id TEXT NOT NULL UNIQUE,
            description TEXT NOT NULL DEFAULT '{}')""",
        """CREATE TABLE jobs (
            id INTEGER PRIMARY KEY, job_id TEXT NOT NULL UNIQUE,
            fabric INTEGER REFERENCES fabrics(id), n_ranks INTEGER NOT NULL DEFAULT 0,
            stage INTEGER NOT NULL DEFAULT 0, started_at_s REAL NOT NULL DEFAULT 0, ended_at_s REAL)""",
        """CREATE TABLE series (
            id INTEGER PRIMARY KEY, fabric INTEGER NOT NULL REFERENCES fabrics(id),
            n_ranks INTEGER NOT NULL, n_nodes INTEGER NOT NULL, message_bytes INTEGER NOT NULL,
            collective INTEGER NOT NULL, phase INTEGER NOT NULL, algorithm INTEGER NOT NULL,
            protocol INTEGER NOT NULL, n_channels INTEGER NOT NULL, is_default INTEGER NOT NULL,
            source INTEGER NOT NULL, outcome INTEGER NOT NULL, timing_source INTEGER NOT NULL,
            UNIQUE (fabric, n_ranks, n_nodes, message_bytes, collective, phase, algorithm, protocol,
                    n_channels, is_default, source, outcome, timing_source))""",
        """CREATE TABLE measurements (
            id INTEGER PRIMARY KEY, series INTEGER NOT NULL REFERENCES series(id),
            job INTEGER NOT NULL REFERENCES jobs(id), epoch INTEGER NOT NULL, step INTEGER NOT NULL,
            duration_us REAL NOT NULL, memory_pressure REAL, measured_at_s INTEGER NOT NULL)""",
        """CREATE TABLE steps (
            job INTEGER NOT NULL REFERENCES jobs(id), step INTEGER NOT NULL, epoch INTEGER NOT NULL,
            duration_us REAL NOT NULL, exposed_us REAL, memory_pressure REAL,
            PRIMARY KEY (job, step)) WITHOUT ROWID""",
        """CREATE TABLE decisions (
            id INTEGER PRIMARY KEY, job INTEGER NOT NULL REFERENCES jobs(id),
            fabric INTEGER NOT NULL REFERENCES fabrics(id), n_ranks INTEGER NOT NULL,
            n_nodes INTEGER NOT NULL, collective INTEGER NOT NULL, phase INTEGER NOT NULL,
            size_class INTEGER NOT NULL, algorithm INTEGER, protocol INTEGER, n_channels INTEGER NOT NULL,
            epoch INTEGER NOT NULL, kind TEXT NOT NULL, reason TEXT NOT NULL, predicted_us REAL,
            predicted_low_us REAL, predicted_high_us REAL, baseline_us REAL,
            n_measurements INTEGER NOT NULL, model_id TEXT NOT NULL, decided_at_s REAL NOT NULL,
            alternatives TEXT NOT NULL)""",
        "CREATE INDEX decisions_by_job ON decisions (job)",
        """CREATE TABLE models (
            name TEXT NOT NULL, fabric_id TEXT NOT NULL, blob BLOB NOT NULL, versions TEXT NOT NULL,
            training_hash TEXT NOT NULL, error REAL, created_at_s REAL NOT NULL,
            PRIMARY KEY (name, fabric_id))""",
    )
    for statement in statements:
        db.execute(statement)


@_step
def m002_step_of_decisions(db: sqlite3.Connection | Database) -> None:
    """The training step of each decision."""
    db.execute("ALTER TABLE decisions ADD COLUMN step INTEGER")


@_step
def m003_names_and_ends_of_jobs(db: sqlite3.Connection | Database) -> None:
    """A job's name, and whether it was lost without an end."""
    db.execute("ALTER TABLE jobs ADD COLUMN name TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE jobs ADD COLUMN is_lost INTEGER NOT NULL DEFAULT 0")


@_step
def m004_what_passed_the_tuner_by(db: sqlite3.Connection | Database) -> None:
    """Sums over a job's collectives with and without the tuner's decision, as JSON (`store/records/passages.py`)."""
    db.execute("ALTER TABLE jobs ADD COLUMN passages TEXT NOT NULL DEFAULT '{}'")


@_step
def m005_what_was_written(db: sqlite3.Connection | Database) -> None:
    """A checksum of each measurement (NULL: not checked), and the number of measurements."""
    db.execute("ALTER TABLE measurements ADD COLUMN checksum INTEGER")
    db.execute("CREATE TABLE tallies (name TEXT PRIMARY KEY, n_rows INTEGER NOT NULL) WITHOUT ROWID")
    db.execute("INSERT INTO tallies SELECT 'measurements', count(*) FROM measurements")


@_step
def m006_who_was_late(db: sqlite3.Connection | Database) -> None:
    """Which ranks of a job collectives waited for, as JSON (`store/records/lateness.py`)."""
    db.execute("ALTER TABLE jobs ADD COLUMN lateness TEXT NOT NULL DEFAULT '{}'")


@_step
def m007_failures(db: sqlite3.Connection | Database) -> None:
    """The rank of a job whose script ended by an exception, and that exception's type."""
    db.execute("ALTER TABLE jobs ADD COLUMN failure TEXT NOT NULL DEFAULT ''")


@_step
def m008_steps_and_decisions_as_written(db: sqlite3.Connection | Database) -> None:
    """A checksum of each step and decision (NULL: not checked)."""
    for table in ("steps", "decisions"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")


@_step
def m009_all_but_models_as_written(db: sqlite3.Connection | Database) -> None:
    """A checksum of each fabric, job and series (NULL: not checked)."""
    for table in ("fabrics", "jobs", "series"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")


@_step
def m010_environment_of_jobs(db: sqlite3.Connection | Database) -> None:
    """A job's training, and variables set at its start, as a trial or permanently."""
    db.execute("ALTER TABLE jobs ADD COLUMN training TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE jobs ADD COLUMN environment TEXT NOT NULL DEFAULT ''")


@_step
def m011_chunk_size_of_series(db: sqlite3.Connection | Database) -> None:
    """A series includes the chunk size that a plan requested; 0: NCCL's own."""
    columns = (
        "fabric, n_ranks, n_nodes, message_bytes, collective, phase, algorithm, protocol, n_channels, is_default,"
        " source, outcome, timing_source"
    )
    names = columns.split(", ")[1:]
    numbers = ", ".join(f"{name} INTEGER NOT NULL" for name in names)
    db.execute(
        "CREATE TABLE series_of_chunks (id INTEGER PRIMARY KEY, fabric INTEGER NOT NULL REFERENCES fabrics(id),"
        f" {numbers}, checksum INTEGER, chunk_bytes INTEGER NOT NULL DEFAULT 0, UNIQUE ({columns}, chunk_bytes))"
    )
    db.execute(f"INSERT INTO series_of_chunks (id, {columns}, checksum) SELECT id, {columns}, checksum FROM series")
    db.execute("DROP TABLE series")
    db.execute("ALTER TABLE series_of_chunks RENAME TO series")


@_step
def m012_chunk_size_of_decisions(db: sqlite3.Connection | Database) -> None:
    """The chunk size that a decision asks for; 0: NCCL's own."""
    db.execute("ALTER TABLE decisions ADD COLUMN chunk_bytes INTEGER NOT NULL DEFAULT 0")


READABLE_WITHOUT: Final = {
    "m002_step_of_decisions", "m003_names_and_ends_of_jobs", "m004_what_passed_the_tuner_by", "m005_what_was_written",
    "m006_who_was_late", "m007_failures", "m008_steps_and_decisions_as_written",
    "m009_all_but_models_as_written", "m010_environment_of_jobs", "m011_chunk_size_of_series",
    "m012_chunk_size_of_decisions",
}  # fmt: skip
"""Steps that a store may lack if it is only read; readers of what they add must expect it to be missing."""


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the schema steps that a store lacks, each in a transaction of its own.

    If a step cannot be applied now, this raises `sqlite3.Error`, and the store keeps the steps before it.
    """
    from sqlite_utils import Database, Migrations  # takes 0.15 s, which readers save

    migrations = Migrations(_SET)
    for step in _STEPS.values():
        migrations()(step)
    migrations.apply(Database(connection))


def applied(connection: sqlite3.Connection) -> list[str]:
    """The store's applied schema steps in order; empty if it records none."""
    is_there = "SELECT 1 FROM sqlite_master WHERE name = ? AND rootpage > 0"
    if not connection.execute(is_there, (MIGRATIONS_TABLE,)).fetchone():
        return []
    rows = connection.execute(f"SELECT name FROM {MIGRATIONS_TABLE} WHERE migration_set = ? ORDER BY rowid", (_SET,))
    return [name for (name,) in rows]


def all_steps() -> frozenset[str]:
    """The names of all schema steps."""
    return frozenset(_STEPS)


@lru_cache(maxsize=2)
def columns_without(pending: frozenset[str]) -> dict[str, frozenset[str]]:
    """The columns of each of our tables in a store that lacks only these steps."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for name, step in _STEPS.items():
            if name in pending:
                break
            step(connection)
        tables: dict[str, set[str]] = {}
        for table, column in connection.execute(
            "SELECT one.name, found.name FROM sqlite_master AS one, pragma_table_info(one.name) AS found"
            " WHERE one.type = 'table'"
        ):
            tables.setdefault(table, set()).add(column)
    return {table: frozenset(columns) for table, columns in tables.items()}
