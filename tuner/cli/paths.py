"""A command's files and addresses, given or by default."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from ...store.atomic_file import users_file
from ...store.errors import UserError
from ...store.foreign.regular_file import begin_of

_DATABASE: Final = b"SQLite format 3\0"
_SIDE_FILES: Final = ("-wal", "-shm", "-journal", ".lock")
"""Suffixes of files that SQLite and this project put beside a database."""


def output_file(path: Path, *, over_database: bool = False) -> Path:
    """A path that can be written to; UserError for a folder, a trace, or a database or its side file.

    A database is allowed with `over_database`.
    """
    from ...store.trace_format import TRACE_SUFFIX

    if not path.name or path.is_dir():
        raise UserError(f"cannot write to {str(path)!r}: it is a folder", "name a file")
    whole = path.resolve()
    for suffix in _SIDE_FILES:
        if whole.name.endswith(suffix) and _is_database(whole.with_name(whole.name.removesuffix(suffix))):
            raise UserError(f"{path} belongs to a database", "name another file")
    if not over_database and _is_database(whole):
        raise UserError(f"{path} is a database, perhaps a store", "name another file, or delete it first")
    if whole.suffix == TRACE_SUFFIX and whole.exists():
        raise UserError(f"{path} is a trace that was recorded", "name another file")
    return path


def _is_database(path: Path) -> bool:
    try:
        return begin_of(path, len(_DATABASE)) == _DATABASE
    except OSError:
        return False  # the writer will report the error


def store_path(path: Path | None, option: str = "--store ") -> Path:
    """The given store file or the default one; UserError if it is a folder. `option` is the command's option for it."""
    from ...store.paths import default_store_path, is_utf8

    chosen = path or default_store_path()
    if path is not None and not path.absolute().parent.is_dir():
        problem = f"the store {path} cannot be there: there is no folder {path.absolute().parent}"
        raise UserError(problem, "make the folder, or correct the path")
    if chosen.is_dir():
        raise UserError(f"the store {chosen} is a folder", f"name a file in it: {option}{chosen / 'store.db'}")
    if not is_utf8(str(chosen.absolute())):
        problem = f"the path of the store, {str(chosen.absolute())!r}, is no UTF-8"
        raise UserError(problem, f"name another with {option}or ZEROTUNE_STORE")
    return chosen


def store_in_use(words: Sequence[str]) -> Path:
    """The store that a command with these words reads, since errors of SQLite do not name their file."""
    from ...store.paths import default_store_path

    given = [
        word.partition("=")[2] or following
        for word, following in pairwise([*words, ""])
        if word.partition("=")[0] == "--store"
    ]
    files = filter(os.path.isfile, (word.rpartition("=")[2] for word in words))
    stores = given or [file for file in files if _is_database(Path(file))]
    return Path(stores[-1]) if stores else default_store_path()


def endpoint_or_default(endpoint: str | None) -> str:
    """The given endpoint or this user's default one; UserError if no daemon can listen there."""
    from ...store.paths import check_endpoint, default_endpoint

    chosen = endpoint or default_endpoint()
    check_endpoint(chosen)
    return chosen


def to_be_named(endpoint: str) -> str:
    """The option that `zerotune status` and others need to find the daemon; empty for the default endpoint."""
    from ...store.paths import default_endpoint

    return "" if endpoint == default_endpoint() else f" --endpoint {endpoint}"


def write_text(path: Path, text: str) -> None:
    """Write a small file; UserError if it cannot be written."""
    with users_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
