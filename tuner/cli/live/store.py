"""`zerotune store`: backup, check and repair of the store's file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....store.counted import counted
from ....store.errors import UserError
from ..grouped import Grouped
from ..offline.book import book
from ..offline.export import export
from ..offline.import_ import import_
from ..options import AsJson, StorePath, console, print_json, sigterm_like_ctrl_c
from ..paths import output_file, store_path
from .models import models

if TYPE_CHECKING:
    from ....store.sqlite.soundness import Soundness

store = typer.Typer(
    cls=Grouped,
    help="""All results of measuring and tuning: back them up, check, import and export them.

    Example: zerotune store check""",
    no_args_is_help=True,
)
store.command(name="import")(import_)
store.command()(export)
store.command()(models)
store.add_typer(book, name="book")


Checked = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH",
        help="The store's file, or a damaged one that was set aside; default: that of --store.",
        show_default=False,
    ),
]


@store.command()
def backup(
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    source: StorePath = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy the store to one file, even while a daemon runs; the copy is a consistent store.

    A failed copy leaves no file. To restore a copy, stop the daemon and replace the store and its side files with it.

    Example: zerotune store backup copy.db
    """
    from ....store.sqlite.backup import back_up

    path = store_path(source)
    with sigterm_like_ctrl_c():  # an incomplete copy is removed
        n_bytes = back_up(path, output_file(out, over_database=True), may_overwrite=force)
    if as_json:
        print_json({"store": str(path), "backup": str(out), "n_bytes": n_bytes})
        return
    print(f"{out}: {n_bytes:,} bytes, a copy of {path}")


@store.command()
def check(context: typer.Context, path: Checked = None, named: StorePath = None, as_json: AsJson = False) -> None:
    """Read the whole store, even while a daemon runs, and count its sound and damaged rows.

    Every page is read, and every cell must have a valid value. Nothing is changed.
    Exit code 0 if all is sound, 1 if something is damaged.

    Example: zerotune store check
    """
    from ....store.sqlite import soundness

    chosen = _chosen(context, path, named)
    with sigterm_like_ctrl_c():  # the check's copy of the store is removed
        found = soundness.check(chosen)
    if as_json:
        print_json({"store": str(chosen), "is_sound": found.is_sound, **_asdict(found)})
    else:
        _show(chosen, found)
        if not found.is_sound:
            print(f"damaged: end the daemon, then run `zerotune store repair {chosen}`")
    if not found.is_sound:
        raise typer.Exit(1)


@store.command()
def repair(context: typer.Context, path: Checked = None, named: StorePath = None, as_json: AsJson = False) -> None:
    """Write the sound rows of a damaged store into a new one, which replaces it; the damaged one is kept.

    Until the new store is complete, the damaged one does not change; a sound store is left alone. No daemon may have
    the store open.

    Example: zerotune store repair
    """
    from ....store.sqlite import soundness

    chosen = _chosen(context, path, named)
    with sigterm_like_ctrl_c():
        done = soundness.repair(chosen)
    if as_json:
        print_json({"store": str(chosen), "kept": None if done.kept is None else str(done.kept), **_asdict(done.found)})
        return
    _show(chosen, done.found)
    if done.kept is None:
        print("nothing is damaged, nothing was changed")
    else:
        print(f"{chosen} is a fresh store with what is sound; the damaged one is kept as {done.kept}")


def _chosen(context: typer.Context, path: Path | None, named: Path | None) -> Path:
    """The chosen store; one from the environment does not conflict with PATH, since it is for other commands, too."""
    source = context.get_parameter_source("named")
    # Compare names, as the type may be click's or typer's own.
    if path is not None and source is not None and source.name == "COMMANDLINE":
        raise UserError(f"both {path} and --store {named} are given", "name one store")
    return store_path(path or named, "" if path else "--store ")


def _asdict(found: Soundness) -> dict[str, Any]:
    import msgspec

    return msgspec.structs.asdict(found)


def _show(path: Path, found: Soundness) -> None:
    """Print the counts of sound and damaged rows."""
    from rich.table import Table

    table = Table("", "sound", "damaged", title=str(path))
    for name, rows in found.tables.items():
        table.add_row(f"rows of {name}", _number(rows.n_sound), _number(rows.n_damaged))
    out = console()
    out.print(table)
    for problem in found.problems:
        out.print(f"SQLite: {problem}")
    if found.stand_ins:
        lost = counted(found.stand_ins, "job or fabric", "jobs and fabrics")
        out.print(f"{lost} that other rows refer to cannot be read: a repair names each recovered-ID")


def _number(value: int | None) -> str:
    return "not known" if value is None else f"{value:,}"
