"""Which store replay learns from, and the message when it has nothing for this trace."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from zerotune.store.errors import UserError

UNKNOWN: Final = "The store has no measurements of this fabric by other runs"


def named_store(store_path: Path, trace: Path) -> Path:
    """A store that the user named.

    Raises:
        UserError: there is none.
    """
    if not store_path.exists() and trace.exists():  # what is wrong with the trace is told elsewhere
        beside = _other_beside(store_path, trace)
        remedy = "leave out --store (or ZEROTUNE_STORE) for the default one"
        remedy = remedy if beside is None else f"there is one at {beside}: --store"
        raise UserError(f"there is no store at {store_path}", remedy)
    return store_path


def why_unknown(store_path: Path | None, trace: Path) -> str:
    """Why the store has nothing for this trace, as the beginning of a sentence; names a store beside it."""
    if store_path is None:
        return UNKNOWN
    beside = _other_beside(store_path, trace)
    if store_path.exists():
        return UNKNOWN if beside is None else f"{UNKNOWN} (there is another at {beside}: --store)"
    remedy = "where the job's daemon used another, name that one" if beside is None else f"there is one at {beside}"
    return f"There is no store at {store_path} ({remedy}: --store)"


def _other_beside(store_path: Path, trace: Path) -> Path | None:
    beside = trace.resolve().parent / "store.db"
    return beside if beside.is_file() and beside != store_path.resolve() else None
