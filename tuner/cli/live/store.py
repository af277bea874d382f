"""`zerotune store`: the store's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zerotune.tuner.cli.options import AsJson, StorePath, print_json
from zerotune.tuner.cli.paths import output_file, store_path

store = typer.Typer(
    help="""The store's file: back it up.

    Example: zerotune store backup copy.db""",
    no_args_is_help=True,
)


@store.callback()
def _a_group() -> None:
    """Without this typer would take a group of one command for that command."""


@store.command()
def backup(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    source: StorePath = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if there is one.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy the store to one file, while a daemon runs or not; the copy is a store, of one moment.

    A copy that fails leaves no file. To go back to a copy, stop the daemon and replace the store and its side files
    by it.

    Example: zerotune store backup copy.db
    """
    from zerotune.store.sqlite.backup import back_up

    path = store_path(source)
    n_bytes = back_up(path, output_file(out), may_overwrite=overwrite)
    if as_json:
        print_json({"store": str(path), "backup": str(out), "n_bytes": n_bytes})
        return
    print(f"{out}: {n_bytes:,} bytes, a copy of {path}")
