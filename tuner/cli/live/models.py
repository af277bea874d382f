"""`zerotune store models`."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import completion
from ..options import AsJson, StorePath, console, print_json
from ..paths import store_path

FabricId = Annotated[
    str | None, typer.Option("--fabric-id", help="Only this fabric's.", autocompletion=completion.fabric_ids)
]


def models(store: StorePath = None, fabric_id: FabricId = None, as_json: AsJson = False) -> None:
    """List every saved model: its training set, its error, and whether it is in use.

    Example: zerotune store models
    """
    from ....store.sqlite.database import Store
    from ...modeling import kept_models

    with Store.open(store_path(store), read_only=True) as opened:
        lines = kept_models.listed(opened, fabric_id)
    if as_json:
        print_json(lines)
        return
    kept_models.render(lines, console())
