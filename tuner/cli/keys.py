"""`zerotune keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keys(folder: Annotated[Path, typer.Argument(help="Where to write them; copy it to every node.")]) -> None:
    """Make the keys that daemons and ranks need to talk over tcp://.

    Example: zerotune keys ~/.config/zerotune/keys
    """
    from tuner.endpoint import make_keys

    make_keys(folder)
    print(f"keys are in {folder}; use them with --curve-keys {folder} or ZEROTUNE_CURVE_KEYS")
