"""The store's schema, as append-only steps.

Never edit or remove a step that was released: add one. A store that names a step unknown here was
written by a newer zerotune.

A *series* is everything that distinguishes what was measured: fabric, communicator class,
collective, phase, message_bytes, candidate and provenance. Training repeats the same few hundred,
so a measurement row is a handful of integers that point to one. Measurements carry no index: reading
all of them takes less time than keeping one would have taken.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from sqlite_utils import Database, Migrations

APPLICATION_ID: Final = 0x5A54554E
"""SQLite's application_id of every store ("ZTUN")."""

MIGRATIONS: Final = Migrations("zerotune")


@MIGRATIONS()
def m001_first_schema(db: Database) -> None:
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


@MIGRATIONS()
def m002_step_of_decisions(db: Database) -> None:
    """At which step a decision was taken."""
    db.execute("ALTER TABLE decisions ADD COLUMN step INTEGER")


@MIGRATIONS()
def m003_names_and_ends_of_jobs(db: Database) -> None:
    """What people call a job, and whether its end was seen."""
    db.execute("ALTER TABLE jobs ADD COLUMN name TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE jobs ADD COLUMN is_lost INTEGER NOT NULL DEFAULT 0")


@MIGRATIONS()
def m004_what_passed_the_tuner_by(db: Database) -> None:
    """Sums of what ran in a job with and without the tuner's decision, as JSON (`store/passages.py`)."""
    db.execute("ALTER TABLE jobs ADD COLUMN passages TEXT NOT NULL DEFAULT '{}'")


@MIGRATIONS()
def m005_what_was_written(db: Database) -> None:
    """A checksum of each measurement (NULL: not checked), and how many measurements there must be."""
    db.execute("ALTER TABLE measurements ADD COLUMN checksum INTEGER")
    db.execute("CREATE TABLE tallies (name TEXT PRIMARY KEY, n_rows INTEGER NOT NULL) WITHOUT ROWID")
    db.execute("INSERT INTO tallies SELECT 'measurements', count(*) FROM measurements")


@MIGRATIONS()
def m006_who_was_late(db: Database) -> None:
    """Which ranks of a job collectives waited for, as JSON (`store/lateness.py`)."""
    db.execute("ALTER TABLE jobs ADD COLUMN lateness TEXT NOT NULL DEFAULT '{}'")


@MIGRATIONS()
def m007_failures(db: Database) -> None:
    """The rank of a job whose script ended by an exception, and that exception's type."""
    db.execute("ALTER TABLE jobs ADD COLUMN failure TEXT NOT NULL DEFAULT ''")


@MIGRATIONS()
def m008_steps_and_decisions_as_written(db: Database) -> None:
    """A checksum of each step and decision (NULL: not checked)."""
    for table in ("steps", "decisions"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")


READABLE_WITHOUT: Final = {
    "m002_step_of_decisions", "m003_names_and_ends_of_jobs", "m004_what_passed_the_tuner_by", "m005_what_was_written",
    "m006_who_was_late", "m007_failures", "m008_steps_and_decisions_as_written",
}  # fmt: skip
"""Steps that a store may lack while it is only read; whoever reads what they add must expect it to be missing."""


@lru_cache(maxsize=1)
def all_steps() -> frozenset[str]:
    """The names of all schema steps."""
    database = Database(memory=True)
    steps = frozenset(step.name for step in MIGRATIONS.pending(database))
    database.close()
    return steps


@lru_cache(maxsize=2)
def columns_without(pending: frozenset[str]) -> dict[str, frozenset[str]]:
    """The columns of every table of ours, in a store that has taken all steps but these."""
    database = Database(memory=True)
    MIGRATIONS.apply(database, stop_before=pending)
    tables = {table.name: frozenset(column.name for column in table.columns) for table in database.tables}
    database.close()
    del tables[MIGRATIONS.migrations_table]
    return tables
