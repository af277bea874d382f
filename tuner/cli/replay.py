"""`zerotune replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.options import AsJson, FabricName, StorePath, console, store_path


def replay(
    trace: Annotated[
        Path, typer.Argument(help="A trace folder of `launch --log-trace`, or another format's file.")
    ],
    policy: Annotated[
        list[str], typer.Option(help="baseline, table, model or oracle; may be given several times.")
    ] = ["baseline", "table", "model", "oracle"],  # noqa: B006 - typer reads the default, nobody changes it
    plan: Annotated[
        Path | None, typer.Option(help="What policy `table` follows: our plan file or NVIDIA's tuner CSV.")
    ] = None,
    store: StorePath = None,
    fabric: FabricName = None,
    as_json: AsJson = False,
) -> None:
    """Judge policies on a recorded trace: what would each have cost, and from which evidence.

    Example: zerotune replay traces/ --policy baseline --policy model
    """
    from tuner import replay as replaying

    result = replaying.replay(trace, policy, store_path(store), fabric, plan)
    if as_json:
        print(result.to_json())
        return
    replaying.render(result, console())
