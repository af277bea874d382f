"""Options for sharing with other daemons, for `zerotune daemon` and the `launch` that starts one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from ...store.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from ..fleet.shelf import Shelf
    from ..fleet.writer import FleetWriter

MAX_CONTRIBUTOR_LENGTH = 253
"""Most characters, as of a node's name in DNS and Kubernetes."""
KEY_SUFFIX: Final = ".key"
"""Suffix of a store's key file, which signs its measurements: a store has one daemon and stays on its node."""


def _a_contributor(value: str | None) -> str | None:
    if value is not None and not (0 < len(value) <= MAX_CONTRIBUTOR_LENGTH and value.isprintable() and value.strip()):
        raise typer.BadParameter(f"{value[:80]!r} is no name: use 1 to {MAX_CONTRIBUTOR_LENGTH} printable characters")
    return value


Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        help="Also listen there for the daemons of a job's other nodes (*: any host, or port).",
        metavar="tcp://HOST:PORT",
    ),
]
Fleet = Annotated[
    str | None,
    typer.Option(
        "--fleet",
        help="Write what is measured below this URL for other nodes: a directory, s3://BUCKET/PREFIX ...",
        metavar="URL",
    ),
]
Contributor = Annotated[
    str | None,
    typer.Option(
        "--contributor",
        help="With --fleet: name of this contributor, beside the store's key; default: the host's name.",
        metavar="NAME",
        callback=_a_contributor,
    ),
]
BookUrl = Annotated[
    str | None,
    typer.Option("--book", help="Book of other nodes' results, file or URL: its settings are tried first."),
]
BookKey = Annotated[
    str | None,
    typer.Option("--book-key", help="Public key that must have signed it: a .pub file, or 64 hexadecimal digits."),
]


def fleet_arguments(fleet: str | None, contributor: str | None, book: str | None, book_key: str | None) -> list[str]:
    """The given options as words of a command line.

    Raises:
        UserError: an option was given without another one that it needs.
    """
    if contributor is not None and fleet is None:
        raise UserError("--contributor is useless without --fleet", "add --fleet, or leave it out")
    if (book is None) != (book_key is None):
        raise UserError("a book is believed by its signature only", "give both --book and --book-key")
    given = {"--fleet": fleet, "--contributor": contributor, "--book": book, "--book-key": book_key}
    return [word for name, value in given.items() if value is not None for word in (name, value)]


def refuse_impossible(fleet: str | None, book: str | None, book_key: str | None) -> None:
    """Check that a daemon could use these options: the URL of measurements, and the key that must have signed the book.

    Raises:
        UserError: packages are missing, or there is no such protocol or key.
    """
    shelf_of(book, book_key)
    if fleet is not None:
        from ..fleet import check_installed

        check_installed("--fleet")
        from ..fleet.storage import Storage

        Storage(fleet, writes=True)


def shelf_of(book: str | None, book_key: str | None, store_file: Path | None = None) -> Shelf | None:
    """The shelf with a daemon's book; None without a book. Raises as `refuse_impossible`.

    `book_key` must be given with `book`. `store_file` is the daemon's store.
    """
    if book is None or book_key is None:
        return None
    from ..fleet import READING, check_installed

    check_installed("--book", READING)
    from ..fleet.shelf import Shelf
    from ..fleet.signing import Verifier
    from ..fleet.storage import Storage

    Storage(book)
    return Shelf(book, Verifier.of(book_key), store_file=store_file)


def fleet_writer(fleet: str | None, contributor: str | None, store: Path) -> FleetWriter | None:
    """The writer of a daemon's measurements for other nodes, with a running thread; None: they are not shared.

    The key for signatures is beside the store, and is made at the first use. Without `contributor`, the host's name is
    used.

    Raises:
        UserError: packages are missing, or the URL or the key cannot be written.
    """
    if fleet is None:
        return None
    import socket

    from ..fleet import check_installed

    check_installed("--fleet")
    from ..fleet.signing import Signer
    from ..fleet.storage import Storage
    from ..fleet.writer import FleetWriter

    storage = Storage(fleet, writes=True)
    signer = Signer.kept(store.with_name(store.name + KEY_SUFFIX), "name a --store in a folder of yours")
    return FleetWriter(storage, contributor or socket.gethostname(), signer)
