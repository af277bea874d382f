"""What nodes learned, shared as files: immutable Parquet objects below a URL, merged into signed books."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from ...store.errors import UserError


def is_book(begin: bytes) -> bool:
    """Whether a file that begins so is a book."""
    return begin.startswith(b'{"zerotune_book":')


KEYS: Final = ("cryptography",)
"""What making a key takes,"""
READING: Final = (*KEYS, "fsspec")
"""what reading a book takes,"""
ALL: Final = ("pyarrow", *READING, "duckdb")
"""and what writing objects and merging them takes."""


def check_installed(what: str, packages: tuple[str, ...] = ALL) -> None:
    """See that optional packages are there.

    Args:
        what: the option or command that needs them, for the message.

    Raises:
        UserError: one is missing.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{what} needs {missing[0]}, which is not installed",
            "pip install 'zerotune[fleet]', or '.[fleet]' where its sources are",
        )
