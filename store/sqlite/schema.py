"""Checks that a store's file has only the tables and indexes that our schema steps make.

SQLite executes triggers and views of a file. So this check comes before anything but the schema is read.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from typing import Final

from .migrations import MIGRATIONS_TABLE, columns_without

MAX_ENTRIES: Final = 1000
"""Entries that a schema may have; ours has some 20."""
MAX_CELL_BYTES: Final = 256 * 2**20
"""Bytes of one text or blob, if this Python can set SQLite's limit; models take less."""
_KEPT_BY_SQLITE: Final = re.compile(r"sqlite_(autoindex_\w+|stat[134]|sequence)")
_OF_COLUMNS: Final = re.compile(r"CREATE (UNIQUE )?INDEX [^()]*\([^()]*\)", re.IGNORECASE)
_COMPUTED: Final = re.compile(r"\b(CHECK|GENERATED|AS|CONFLICT|TRIGGER)\b", re.IGNORECASE)
"""Clauses by which a table computes or deletes when rows are written."""
OUR_INDEXES: Final = {"decisions_by_job"}


def guarded(connection: sqlite3.Connection) -> sqlite3.Connection:
    """The connection, with functions in schemas forbidden and the size of cells limited."""
    with contextlib.suppress(sqlite3.DatabaseError):  # the file is damaged; reading will show it
        connection.execute("PRAGMA trusted_schema = OFF")
    if hasattr(connection, "setlimit"):  # from Python 3.11 on
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
    return connection


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """Whether there is an ordinary table of this name, neither a view nor a virtual table."""
    found = "SELECT 1 FROM main.sqlite_master WHERE type = 'table' AND rootpage > 0 AND name = ?"
    return connection.execute(found, (name,)).fetchone() is not None


def stranger(connection: sqlite3.Connection) -> str:
    """The first entry of a file's schema that our steps do not make; empty: there is none."""
    entries = connection.execute(
        f"SELECT type, name, rootpage, sql, tbl_name FROM main.sqlite_master LIMIT {MAX_ENTRIES + 1}"
    ).fetchall()
    if len(entries) > MAX_ENTRIES:
        return "more than a store has"
    for kind, name, rootpage, _, _ in entries:
        if kind not in ("table", "index") or not isinstance(rootpage, int) or rootpage <= 0:
            return f"a {kind} {name!r}, which no store has"
    names = {MIGRATIONS_TABLE, *columns_without(frozenset())}
    for kind, name, _, sql, table in entries:
        if _KEPT_BY_SQLITE.fullmatch(str(name)):
            continue
        words = " ".join(str(sql).split())
        is_of_columns = _OF_COLUMNS.fullmatch(words) and (table == MIGRATIONS_TABLE or name in OUR_INDEXES)
        if not (is_of_columns if kind == "index" else name in names and not _COMPUTED.search(words)):
            return f"a {kind} {name!r}, which no store has"
    return ""
