"""A consistent copy, in one file, of a store that may be in use."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from ..atomic_file import atomic_write
from ..errors import StoreError, reason
from .opening import open_for_reading

_ANOTHER = "name another file"


def back_up(store: Path, target: Path, *, may_overwrite: bool = False) -> int:
    """Copy what is committed in `store` to `target`, completely or not at all; writers go on meanwhile.

    Returns the bytes of the copy, which has no side files.

    Raises:
        StoreError: `store` cannot be read; `target` cannot be written, exists and may not be overwritten, or belongs to
            a database in use.
    """
    with contextlib.closing(open_for_reading(store)) as source:
        _check_target(store, target, may_overwrite)
        try:
            # The copy is as private as the store.
            with atomic_write(target, 0o600) as partial, contextlib.closing(sqlite3.connect(partial)) as copy:
                source.backup(copy)  # all pages in one reading transaction: a writer's commits do not disturb it
                copy.execute("PRAGMA journal_mode = DELETE")  # no side files, wherever it is read
            return target.stat().st_size
        except (sqlite3.Error, OSError, MemoryError) as error:
            raise StoreError(f"backup {target} cannot be written: {reason(error)}", _ANOTHER) from error


def _check_target(store: Path, target: Path, may_overwrite: bool) -> None:
    if target.exists():
        if not target.is_file():
            raise StoreError(f"{target} is no file", _ANOTHER)
        if target.samefile(store):
            raise StoreError(f"{target} is the store itself", _ANOTHER)
        if not may_overwrite:
            raise StoreError(f"{target} exists already", f"{_ANOTHER}, or add --force")
    whole = target.resolve()
    for suffix in ("-wal", "-journal"):  # SQLite would take it for the copy's log, and apply it
        if whole.with_name(whole.name + suffix).exists():
            raise StoreError(f"{target} belongs to a database in use, there is a {whole.name}{suffix}", _ANOTHER)
