"""Options and helpers that several commands share."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer

from ...store.errors import UserError
from ...store.records.job_names import MAX_NAME_LENGTH, is_job_name
from . import completion
from .terminal import shown


def _existing_keys(context: typer.Context, folder: Path | None) -> Path | None:
    if folder is not None and not folder.is_dir() and not context.resilient_parsing:  # not during shell completion
        raise UserError(f"there is no folder of keys at {folder}", f"make one with `zerotune daemon keys {folder}`")
    return folder


def a_number(value: float | None) -> float | None:
    """Refuse infinity and nan, which pass any minimum; for an option's `callback`."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number")
    return value


def a_job_name(value: str | None) -> str | None:
    """Refuse an invalid job name; for an option's `callback`."""
    if value is not None and not is_job_name(value):
        use = f"use 1 to {MAX_NAME_LENGTH} letters, digits, inner spaces and signs like -_.:/"
        raise typer.BadParameter(f"{value!r} is no name for a job: {use}")
    return value


Endpoint = Annotated[
    str | None,
    typer.Option(
        help="ZeroMQ endpoint of the daemon; default: ipc:// below the runtime directory.",
        envvar="ZEROTUNE_ENDPOINT",
    ),
]
NicGbps = Annotated[
    float | None,
    typer.Option(
        "--nic-gbps",
        help="Gbit/s of each network adapter, if a topology file leaves it open.",
        min=0.001,
        max=10_000,
        callback=a_number,
    ),
]
StorePath = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="The store's SQLite file; default: below the XDG data directory.",
        envvar="ZEROTUNE_STORE",
    ),
]
JobOfTrace = Annotated[
    str | None,
    typer.Option("--job", help="Job id or name, where the folder has traces of several jobs.", show_default=False),
]
JobOfStore = Annotated[
    str | None,
    typer.Option("--job", help="Job id or name; default: the newest job that trained.", autocompletion=completion.jobs),
]
FabricName = Annotated[
    str | None,
    typer.Option(
        "--fabric",
        help="Name or path of a fabric file: use the emulated NCCL. See `zerotune hardware`.",
        autocompletion=completion.fabrics,
    ),
]
CurveKeys = Annotated[
    Path | None,
    typer.Option(
        "--curve-keys",
        help="Folder with the keys for tcp:// endpoints, see `zerotune daemon keys`.",
        callback=_existing_keys,
        envvar="ZEROTUNE_CURVE_KEYS",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


COLUMNS_OF_A_FILE: Final = 160
"""Width of tables in files and pipes; rich would fold them at 80 columns."""


def console() -> Any:
    """The console for tables. Text that does not fit into a cell is folded; rich would cut it."""
    from rich.table import Table

    class Folding(_filtering()):  # type: ignore[misc]
        def print(self, *objects: Any, **options: Any) -> None:
            for table in objects:
                for column in table.columns if isinstance(table, Table) else ():
                    column.overflow = "fold"
            super().print(*objects, **options)

    return Folding(sys.stdout)


def print_json(document: object) -> None:
    """Print one JSON document on stdout."""
    import msgspec

    print(msgspec.json.encode(document).decode())


def progress_console() -> Any:
    """The console for progress: stderr, so that `--json` and pipes stay clean."""
    return _filtering()(sys.stderr)


def _filtering() -> Any:
    """A class of consoles that show control characters as text, before rich adds its own codes.

    Square brackets in a name do not count as markup, and make no link.
    """
    from rich.console import Console
    from rich.errors import MarkupError
    from rich.segment import Segment

    class Filtering(Console):
        def __init__(self, stream: TextIO, **options: Any) -> None:
            super().__init__(file=getattr(stream, "unfiltered", stream), emoji=False, **options)
            if not self.is_terminal and "COLUMNS" not in os.environ:
                self.width = COLUMNS_OF_A_FILE

        def render_str(self, text: str, **options: Any) -> Any:
            try:
                return super().render_str(text, **options)
            except MarkupError:
                return super().render_str(text, **{**options, "markup": False})

        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            return super()._render_buffer(segment if segment.control else harmless(segment) for segment in buffer)

    def harmless(segment: Segment) -> Segment:
        style = segment.style
        return Segment(shown(segment.text), style.update_link(None) if style is not None and style.link else style)

    return Filtering


@contextlib.contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM, which batch systems send before they kill, end a command as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
