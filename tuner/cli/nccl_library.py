"""The libnccl.so.2 that a command loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...store.errors import UserError

NcclLibrary = Annotated[
    Path | None,
    typer.Option("--library", help="A libnccl.so.2; default: NCCL_LIBRARY, else torch's."),
]


def nccl_library(named: Path | None) -> Path:
    """The given library, or else the one found here; UserError if there is none."""
    from ...agent.nccl.libnccl import LIBRARY_VARIABLE, find_libnccl

    if named is not None and not named.is_file():
        raise UserError(f"{named} is no file", "name a libnccl.so.2")
    found = named or find_libnccl()
    if found is None:
        raise UserError(
            "there is no libnccl.so.2 here",
            f"pip install 'zerotune[nccl]', or set {LIBRARY_VARIABLE}, or use --library",
        )
    return found
