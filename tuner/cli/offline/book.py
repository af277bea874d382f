"""`zerotune store book`: the fleet's results, as one signed file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....store.counted import counted
from ..grouped import Grouped
from ..options import AsJson, console, print_json, progress_console
from ..paths import output_file

book = typer.Typer(
    cls=Grouped,
    help="""The fleet's results as one signed file (docs/operate/fleet.md): build it, show it, compare it.

    It needs the extra `fleet`: pip install 'zerotune[fleet]'.

    Example: zerotune store book build s3://bucket/zerotune --out fleet.book --sign book.key""",
    no_args_is_help=True,
)

BookKey = Annotated[
    str | None,
    typer.Option("--book-key", help="Public key that must have signed it: the .pub file, or 64 hexadecimal digits."),
]


@book.command()
def key(
    file: Annotated[Path, typer.Argument(help="Private key to write; the public one goes to FILE.pub.")],
    as_json: AsJson = False,
) -> None:
    """Make a key that signs books; keep the private key where books are built, and give the public one to all nodes.

    Example: zerotune store book key book.key
    """
    from ...fleet import KEYS, check_installed

    check_installed("book key", KEYS)
    from ...fleet.signing import make_key, public_path

    public = make_key(file)
    if as_json:
        print_json({"private": str(file), "public": str(public_path(file)), "key": public})
        return
    print(
        f"{file} signs with `book build --sign {file}`; nodes check with `--book-key {public_path(file)}` or {public}"
    )


@book.command()
def build(
    url: Annotated[str, typer.Argument(help="URL of `daemon --fleet`: a directory, s3://BUCKET/PREFIX ...")],
    out: Annotated[Path, typer.Option("--out", help="The book; merged data is kept beside it.")] = Path(
        "fleet.book"
    ),
    sign: Annotated[Path | None, typer.Option("--sign", help="Private key, see `book key`.")] = None,
    contributors: Annotated[
        Path | None,
        typer.Option("--contributors", help="File of accepted contributors; each line: a key of `status`, and a name."),
    ] = None,
    memory_mb: Annotated[int, typer.Option("--memory-mb", help="Memory that DuckDB may take.", min=64)] = 4096,
    as_json: AsJson = False,
) -> None:
    """Merge new objects below a URL, and write the book of all merged ones.

    After an interruption, the same command goes on. Objects that are damaged or foreign are skipped and listed.

    Example: zerotune store book build s3://bucket/zerotune --out fleet.book --sign book.key
    """
    from ...fleet import check_installed

    check_installed("book build")
    from ...fleet.building import build as build_book
    from ...fleet.signing import Signer, listed_keys
    from ...service.daemon_status import version

    signer = None if sign is None else Signer.from_file(sign)
    listed = None if contributors is None else listed_keys(contributors)
    out = output_file(out)
    with progress_console().status("reading") as status:
        built = build_book(
            url, out, listed=listed, signer=signer, memory_mb=memory_mb,
            made_by=f"zerotune {version()}",
            progress=lambda looked_at, there_are, n_rows: status.update(
                f"{looked_at:,} of {there_are:,} new objects, {n_rows:,} measurements"
            ),
        )  # fmt: skip
    merged, found = built.merged, built.book
    n_winners = sum(1 for _ in found.winners())
    if as_json:
        print_json(
            {
                "file": str(out), "n_objects": merged.n_objects, "n_known": merged.n_known, "n_rows": merged.n_rows,
                "skipped": [{"path": path, "reason": reason} for path, reason in merged.skipped],
                "set_aside": [one.shown for one in found.contributors if one.is_set_aside],
                "n_cells": len(found.cells), "n_winners": n_winners, "signed_by": found.signed_by,
            }
        )  # fmt: skip
        return
    print(
        f"{out}: {counted(len(found.cells), 'setting')}, {counted(n_winners, 'winner')},"
        f" of {counted(found.head.n_rows, 'measurement')};"
        f" new: {merged.n_rows:,} in {counted(merged.n_objects, 'object')}, {len(merged.skipped):,} skipped"
    )
    if sign is None:
        typer.echo("zerotune: it is not signed, so no daemon will believe it; sign it with --sign KEY", err=True)


@book.command()
def show(
    file: Annotated[str, typer.Argument(metavar="BOOK", help="File or URL of a book.")],
    book_key: BookKey = None,
    fabric_id: Annotated[str | None, typer.Option("--fabric-id", help="Only this fabric's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a book: its origin, excluded contributors, and the winning settings by key.

    Example: zerotune store book show fleet.book --book-key book.key.pub
    """
    from ...fleet import READING, check_installed

    check_installed("book show", READING)
    from ...fleet import reading
    from ...fleet.signing import Verifier

    verifier = None if book_key is None else Verifier.of(book_key)
    found = reading.read_book(file, verifier)
    if as_json:
        print_json(reading.to_json(found))
        return
    reading.render(found, console(), fabric_id, is_checked=verifier is not None)


@book.command()
def diff(
    before: Annotated[str, typer.Argument(help="File or URL of a book.")],
    after: Annotated[str, typer.Argument(help="The other.")],
    as_json: AsJson = False,
) -> None:
    """Show the keys at which two books have different winners.

    Example: zerotune store book diff old.book fleet.book
    """
    from ...fleet import READING, check_installed

    check_installed("book diff", READING)
    from ...fleet import reading

    found = list(reading.differences(reading.read_book(before), reading.read_book(after)))
    if as_json:
        import msgspec

        print_json([msgspec.to_builtins(pair._asdict()) for pair in found])
        return
    reading.render_differences(found, console())
