"""`zerotune fabrics`."""

from __future__ import annotations

from zerotune.tuner.cli.options import AsJson, console


def fabrics(as_json: AsJson = False) -> None:
    """List the fabrics of the emulated NCCL.

    Example: zerotune fabrics
    """
    import json

    from zerotune.agent.nccl import fabric

    described = {name: fabric.load(name).describe() for name in fabric.names()}
    if as_json:
        print(json.dumps(described, indent=2))
        return
    from rich.table import Table

    table = Table("fabric", "what it is", title="Fabrics of the emulated NCCL (launch --fabric NAME)")
    for name, description in described.items():
        table.add_row(name, str(description["title"]))
    console().print(table)
