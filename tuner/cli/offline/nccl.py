"""`zerotune nccl`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....store.errors import UserError
from .. import completion
from ..nccl_library import NcclLibrary, nccl_library
from ..options import AsJson, NicGbps, console, print_json
from ..paths import output_file
from ..sizes import a_size

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
_TUNED = _COLLECTIVES[:3]
_MAX_SIZES = 64


def nccl(
    topology: Annotated[
        str,
        typer.Argument(
            help="A file that NCCL_TOPO_DUMP_FILE wrote, a machine of zerotune's (`list` names them), or a fabric.",
            autocompletion=completion.machines,
        ),
    ],
    nodes: Annotated[int, typer.Option(help="Nodes.", min=1)] = 1,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks of each node; default: all of its GPUs.", min=1)
    ] = None,
    collective: Annotated[
        list[str] | None,
        typer.Option(help=f"Of {', '.join(_COLLECTIVES)}; repeat it.", autocompletion=completion.one_of(*_COLLECTIVES)),
    ] = None,
    min_bytes: Annotated[int, typer.Option(help="Smallest message, e.g. 64K.", parser=a_size, metavar="SIZE")] = 1
    << 10,
    max_bytes: Annotated[int, typer.Option(help="Largest message, e.g. 1GiB.", parser=a_size, metavar="SIZE")] = 1
    << 30,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="h100_80gb, ...: what a topology file leaves to the machine, as on a baseboard of eight.",
            autocompletion=completion.gpus,
        ),
    ] = None,
    nic_gbps: NicGbps = None,
    library: NcclLibrary = None,
    against: Annotated[
        Path | None, typer.Option(help="Another libnccl.so.2: show what it would choose differently.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file to judge, or NVIDIA's tuner CSV.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a picture of the choices, .png or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """What NCCL's own library would choose on a described cluster. Needs no GPU.

    With --plan: exit code 1 when a row of the plan does nothing there.

    Example: zerotune nccl dgx_h100 --nodes 2
    """
    from ....agent.nccl.mock_cuda.machine import connect, read_machine
    from ....agent.nccl.twin.machines import MACHINES
    from ....agent.nccl.twin.twin import Cluster, topology_file
    from ....store.records import Collective, CommunicatorClass
    from ...advice.hardware.gpus import gpu as find_gpu
    from ...offline.nccl_choices import choices, plan_check, render

    if topology == "list":
        titles = {name: machine.title for name, machine in MACHINES.items()}
        print_json(titles) if as_json else print("\n".join(f"{name:14s} {title}" for name, title in titles.items()))
        return
    found_library = nccl_library(library)
    if plan is not None and against is not None:
        raise UserError("--plan and --against ask for two things", "give one of them")
    with topology_file(topology, find_gpu(gpu).capability if gpu else None, nic_gbps) as path:
        machine = read_machine(path)
        connect(machine, topology, nodes)
        cluster = Cluster(path, nodes, ranks_per_node or len(machine.gpus))
        if plan is not None:
            from ...offline.replay.plans import plan_rows

            rows = plan_rows(plan, [CommunicatorClass(cluster.n_ranks, cluster.n_nodes)])
            rows = rows if plan.suffix == ".json" else plan_check.without_phases(rows)
            judged = plan_check.judge(found_library, cluster, rows)
            print_json(judged) if as_json else render.show([render.plan_table(judged)], console())
            raise typer.Exit(0 if all(row.effect.does_something for row in judged) else 1)
        wanted = [Collective[_known(name)] for name in collective or _TUNED]
        sizes = _sizes(min_bytes, max_bytes)
        before = choices.ask(found_library, cluster, wanted, sizes)
        after = choices.ask(nccl_library(against), cluster, wanted, sizes) if against is not None else None
    if picture is not None:
        from ...offline.nccl_choices.picture import picture_of
        from ...offline.plots import save

        save(picture_of(before), output_file(picture))
    changed = list(choices.changes(before, after)) if after is not None else []
    if as_json:
        print_json(before if after is None else {"before": before, "after": after, "changes": changed})
    elif after is not None:
        render.show([render.changes_table(before, after, changed)], console())
    else:
        render.show([render.choices_table(before)], console())


def _known(name: str) -> str:
    if name not in _COLLECTIVES:
        raise UserError(f"{name!r} is no collective that NCCL tunes", f"use {', '.join(_COLLECTIVES)}")
    return name


def _sizes(min_bytes: int, max_bytes: int) -> list[int]:
    """Doubling from the smallest on."""
    if min_bytes > max_bytes:
        raise UserError(f"--min-bytes {min_bytes} is above --max-bytes {max_bytes}", "exchange them")
    sizes = [min_bytes << place for place in range(_MAX_SIZES) if min_bytes << place <= max_bytes]
    return sizes if sizes[-1] == max_bytes else [*sizes, max_bytes]
