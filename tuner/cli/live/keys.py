"""`zerotune daemon keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import AsJson, print_json


def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them; copy it to every node.")],
    as_json: AsJson = False,
) -> None:
    """Make the keys that daemons and ranks need to talk over tcp://.

    Example: zerotune daemon keys ~/.config/zerotune/keys
    """
    from ...service.endpoint import make_keys

    make_keys(folder)
    if as_json:
        print_json({"folder": str(folder), "environment": {"ZEROTUNE_CURVE_KEYS": str(folder.absolute())}})
    else:
        print(f"keys are in {folder}; use them with --curve-keys {folder} or ZEROTUNE_CURVE_KEYS")
