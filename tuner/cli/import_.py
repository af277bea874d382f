"""`zerotune import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.options import StorePath, console, store_path


def import_(
    path: Annotated[Path, typer.Argument(help="A file, or a folder with one file per rank.")],
    store: StorePath = None,
    fabric_id: Annotated[
        str | None, typer.Option(help="Hardware it was measured on; default: the folder's name.")
    ] = None,
    setting: Annotated[
        str | None, typer.Option(help="What ran, where the file does not say: e.g. ring/ll128 or ring/ll128/8.")
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="The file shows NCCL's own choices.")] = False,
    n_nodes: Annotated[int | None, typer.Option(help="Nodes, where the file does not say.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what was found and could be used.")] = False,
) -> None:
    """Import measurements of nccl-tests, NVIDIA's tuner CSV and other formats (docs/traces.md).

    Example: zerotune import all_gather.log --default --n-nodes 2 --fabric-id my-cluster
    """
    from tuner import importing

    trace, n_rows = importing.import_measurements(
        path,
        store_path(store),
        fabric_id=fabric_id,
        setting=importing.parse_setting(setting) if setting else None,
        is_default=default,
        n_nodes=n_nodes,
        dry_run=dry_run,
    )
    importing.render(trace, n_rows, console(), dry_run=dry_run)
