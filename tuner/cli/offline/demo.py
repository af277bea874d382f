"""`zerotune demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import FabricName, console, sigterm_like_ctrl_c


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, the store and the logs.")] = Path("run"),
    fabric: FabricName = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of each run.", min=8)] = None,
) -> None:
    """Show the whole loop on this machine without a GPU (what `make run` does).

    Example: zerotune demo --out run
    """
    from ...demo import demo as demonstration

    with sigterm_like_ctrl_c():
        try:
            demonstration.demo(
                out, console(), fabric=fabric or demonstration.FABRIC, n_steps=steps or demonstration.N_STEPS
            )
        except KeyboardInterrupt:
            typer.echo(f"zerotune: interrupted; {out}/ is incomplete", err=True)
            raise
