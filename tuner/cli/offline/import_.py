"""`zerotune store import`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import completion
from ..options import AsJson, StorePath, console, progress_console
from ..paths import store_path

if TYPE_CHECKING:
    from ....store.records import Collective

FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="If the file's beginning does not show its format: zerotune, flight_recorder, flight_recorder_pickle,"
        " kineto, execution_trace, nccl_tests_json, inspector, profiler_events, tuner_csv, measurements_csv,"
        " summary_csv, nccl_tests, nccl_debug or chakra (docs/reference/formats.md).",
        autocompletion=completion.formats,
    ),
]
CollectiveName = Annotated[
    str | None,
    typer.Option(
        "--collective",
        help=f"The collective, if the files do not name it: {completion.COLLECTIVES}.",
        autocompletion=completion.collectives,
    ),
]


def collective_named(name: str | None) -> Collective | None:
    """The collective with this name in any usual spelling; UserError if there is none."""
    from ....agent.nccl.catalog import find_collective
    from ....store.errors import UserError
    from ....store.records import Collective

    if name is None:
        return None
    found = find_collective(name)
    if found is None:
        raise UserError(f"there is no collective {name!r}", f"use one of {', '.join(one.name for one in Collective)}")
    return found


def import_(
    path: Annotated[Path, typer.Argument(help="A file, or a folder with one file per rank.")],
    store: StorePath = None,
    fabric_id: Annotated[
        str | None,
        typer.Option(
            help="Hardware it was measured on, if the file does not name it; default: the folder's name.",
            autocompletion=completion.fabric_ids,
        ),
    ] = None,
    setting: Annotated[
        str | None, typer.Option(help="The setting, if the file does not name it: ring/ll128, ring/ll128/8ch or tree.")
    ] = None,
    default: Annotated[
        bool, typer.Option("--default", help="NCCL chose the settings, if the file does not say who did.")
    ] = False,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes, if the file does not say, or counts them wrongly.", min=1)
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Ranks, if the file does not say, or counts them wrongly.", min=2)
    ] = None,
    collective: CollectiveName = None,
    format_name: FormatName = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report what was found, and what could not be used and why.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import measurements of nccl-tests, NVIDIA's tuner CSV and other formats (docs/reference/formats.md).

    Example: zerotune store import all_gather.log --default --nodes 2 --fabric-id my-cluster

    Look first: zerotune store import old.log --collective all_reduce --dry-run

    Options give what the file does not say; they overrule a table's ranks and nodes. Nothing is recorded twice.

    Exit code 2: the file cannot be read, has no known format or no usable measurement, or contradicts an option.
    """
    from ...offline.importing import command as importing
    from ...offline.importing import messages

    try:
        with progress_console().status(f"reading {path}"):
            trace, n_rows = importing.import_measurements(
                path,
                store_path(store),
                fabric_id=fabric_id,
                setting=None if setting is None else importing.parse_setting(setting),
                is_default=default,
                n_nodes=nodes,
                n_ranks=ranks,
                dry_run=dry_run,
                format_name=format_name,
                collective=collective_named(collective),
            )
    except KeyboardInterrupt:
        typer.echo("zerotune: interrupted; what was recorded stays, and the same command goes on from there", err=True)
        raise
    if as_json:
        print(messages.to_json(trace, n_rows, dry_run=dry_run))
        return
    messages.render(trace, n_rows, console(), dry_run=dry_run)
