"""Files and addresses that a command is given, or their defaults."""

from __future__ import annotations

from pathlib import Path

from zerotune.store.atomic_file import users_file
from zerotune.store.errors import UserError


def output_file(path: Path) -> Path:
    """A path that can be written to; UserError when it is a folder."""
    if not path.name or path.is_dir():
        raise UserError(f"cannot write to {str(path)!r}: it is a folder", "name a file")
    return path


def store_path(path: Path | None) -> Path:
    """The given store file or the default one; UserError when it is a folder."""
    from zerotune.store.paths import default_store_path

    chosen = path or default_store_path()
    if chosen.is_dir():
        raise UserError(f"the store {chosen} is a folder", f"name a file in it: --store {chosen / 'store.db'}")
    return chosen


def endpoint_or_default(endpoint: str | None) -> str:
    """The given endpoint or this user's default one; UserError when no daemon could ever be there."""
    from zerotune.store.endpoints import check_endpoint
    from zerotune.store.paths import default_endpoint

    chosen = endpoint or default_endpoint()
    check_endpoint(chosen)
    return chosen


def write_text(path: Path, text: str) -> None:
    """Write a small file; UserError when it cannot be written."""
    with users_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
