"""`zerotune hardware`: list the described machines, add and remove the user's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ....store.errors import FabricError
from .. import completion
from ..grouped import Grouped
from ..nccl_library import NcclLibrary, nccl_library
from ..options import AsJson, console, print_json, progress_console

hardware = typer.Typer(cls=Grouped, invoke_without_command=True)

_EXACT = 1e-3
"""Relative error of NCCL's estimates by rounding."""


@hardware.callback()
def show(context: typer.Context, as_json: AsJson = False) -> None:
    """List the described machines, to emulate and to predict for. Add your own.

    Example: zerotune hardware
    """
    if context.invoked_subcommand is not None:
        return
    from ....agent.nccl import fabric

    described: dict[str, dict[str, str | int | float | bool]] = {
        name: fabric.load(name).describe() for name in fabric.names()
    }
    for name in fabric.user_names():
        try:
            described[name] = fabric.load(name).describe()
        except FabricError as error:  # the user edited this file wrongly; the others can be used
            described[name] = {"title": f"cannot be used: {error}"}
    from ....agent.nccl.twin.machines import MACHINES

    if as_json:
        machines = {name: {"title": machine.title} for name, machine in MACHINES.items()}
        print_json({"fabrics": described, "machines": machines})
        return
    from rich.table import Table

    fabrics = Table("fabric", "what it is", "nodes x ranks", title="To emulate (--fabric NAME), and to predict for")
    fabrics.caption = "Ranks fill one node after another: 2 ranks of h100_ib_2 run on one node."
    for name, description in described.items():
        shape = [str(description[what]) for what in ("max_nodes", "ranks_per_node") if what in description]
        fabrics.add_row(name, str(description["title"]), " x ".join(shape))
    machines_table = Table("machine", "what it is", title="To predict for (predict NAME, advise --fabric NAME)")
    for name, machine in MACHINES.items():
        machines_table.add_row(name, machine.title)
    console().print(fabrics)
    console().print(machines_table)


@hardware.command()
def add(
    name: Annotated[str, typer.Argument(help="Name of the new fabric.")],
    topology: Annotated[Path, typer.Option(help="A file that NCCL_TOPO_DUMP_FILE wrote on the machine; it is copied.")],
    nodes: Annotated[int, typer.Option(help="Number of such nodes.", min=1)] = 1,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks of each node; default: all of its GPUs.", min=1)
    ] = None,
    library: NcclLibrary = None,
    force: Annotated[bool, typer.Option("--force", help="Replace your fabric of this name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a fabric of your own machine, with NCCL's own estimates. Needs no GPU.

    Its times are NCCL's own estimates, so NCCL's choice is the best one there.

    Example: zerotune hardware add mine --topology t.xml --nodes 2
    """
    from ...offline.user_fabrics import keeping

    keeping.check_name(name, force=force)
    if not topology.exists():
        raise FabricError(f"there is no topology file {topology}", "name one that NCCL_TOPO_DUMP_FILE wrote")
    found_library = nccl_library(library)
    with progress_console().status("NCCL searches the topology"):
        added = keeping.add(
            name, topology, n_nodes=nodes, ranks_per_node=ranks_per_node, library=found_library, force=force
        )
    if added.worst_relative_error > _EXACT:
        print(f"some of NCCL's estimates are missed by {added.worst_relative_error:.0%}", file=sys.stderr)
    if as_json:
        print_json(added)
        return
    out = console()
    what = f"{added.n_nodes} x {added.ranks_per_node} GPUs, as NCCL {added.nccl} believes"
    out.print(f"fabric {name}: {what}", highlight=False)
    out.print(
        f"Its times are NCCL's own estimates, until you edit \\[truth] in {added.file}", soft_wrap=True, highlight=False
    )


@hardware.command()
def remove(
    name: Annotated[str, typer.Argument(help="A fabric that was added.", autocompletion=completion.user_fabrics)],
    as_json: AsJson = False,
) -> None:
    """Remove a fabric that you added.

    Example: zerotune hardware remove mine
    """
    from ...offline.user_fabrics import keeping

    keeping.remove(name)
    print_json({"removed": name}) if as_json else print(f"fabric {name} is removed")
