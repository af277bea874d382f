"""`zerotune jobs`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..options import AsJson, StorePath, console, print_json
from ..paths import store_path


def jobs(
    store: StorePath = None,
    limit: Annotated[int, typer.Option(help="Most jobs shown, the newest.", min=1)] = 20,
    all_kinds: Annotated[bool, typer.Option("--all", help="Also jobs without steps: sweeps, imports.")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first: name, gain over NCCL's own choice, kind of training, end.

    Example: zerotune jobs --limit 5
    """
    from ...offline.jobs import listing, listing_shown

    lines = listing.list_jobs(store_path(store), limit=limit, all_kinds=all_kinds)
    if as_json:
        print_json(lines)
        return
    listing_shown.render(lines, console())
