"""Refuses files that are no SQLite database; it imports little, since `launch` asks before each training."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..errors import StoreError
from ..foreign.regular_file import begin_of

SQLITE_HEADER: Final = b"SQLite format 3\0"
ELSEWHERE: Final = "name another store, in the command or with ZEROTUNE_STORE"
_DATABASE_SUFFIXES: Final = (".db", ".sqlite", ".sqlite3")


def refuse_foreign(path: Path) -> None:
    """Refuse a mistyped path: a file that is no database by its first bytes and its name."""
    if path.is_file() and path.suffix not in _DATABASE_SUFFIXES:
        begin = begin_of(path, len(SQLITE_HEADER))
        if begin and begin != SQLITE_HEADER:
            raise StoreError(f"{path} is no zerotune store", ELSEWHERE)
