"""Shares nodes' measurements as files: immutable Parquet objects below a URL, merged into signed books."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from ...store.errors import UserError


def is_book(begin: bytes) -> bool:
    """Whether a file with this beginning is a book."""
    return begin.startswith(b'{"zerotune_book":')


KEYS: Final = ("cryptography",)
"""Packages for making a key."""
READING: Final = (*KEYS, "fsspec")
"""Packages for reading a book."""
ALL: Final = ("pyarrow", *READING, "duckdb")
"""Packages for writing and merging objects."""


def check_installed(what: str, packages: tuple[str, ...] = ALL) -> None:
    """Raise UserError if an optional package is missing for `what`, an option or a command."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{what} needs {missing[0]}, which is not installed",
            "pip install 'zerotune[fleet]', or '.[fleet]' where its sources are",
        )
