"""`zerotune predict`: NCCL's choices on a described cluster, or the settings of a job that began now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....store.errors import UserError
from .. import completion
from ..nccl_library import NcclLibrary, nccl_library
from ..options import AsJson, NicGbps, StorePath, console, print_json
from ..paths import output_file, store_path
from ..sizes import parse_bytes

if TYPE_CHECKING:
    from ....agent.nccl.twin.twin import Cluster

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
_TUNED = _COLLECTIVES[:3]
_MAX_NODES = 1 << 16


def predict(
    topology: Annotated[
        str | None,
        typer.Argument(
            metavar="[MACHINE]",
            help="Ask NCCL's own library about this machine: a name of `zerotune hardware`, or a file that"
            " NCCL_TOPO_DUMP_FILE wrote. Without it: show what a job that began here now would run.",
            autocompletion=completion.machines,
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Node counts, e.g. 1,2,4; default: 1, without MACHINE 1,2,4,8.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks of each node; default: all of its GPUs.", min=1, max=_MAX_NODES)
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="Message sizes: 1K:1G doubles from the first on (default); or 64K,1M."),
    ] = None,
    collective: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of {', '.join(_COLLECTIVES)}; repeat it; default: the three of ZeRO.",
            autocompletion=completion.one_of(*_COLLECTIVES),
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"Of {completion.GPUS}: what a topology file leaves to the machine, as on a baseboard of eight.",
            autocompletion=completion.gpus,
        ),
    ] = None,
    nic_gbps: NicGbps = None,
    library: NcclLibrary = None,
    against: Annotated[
        Path | None, typer.Option(help="Another libnccl.so.2: show its different choices.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan file to judge, or NVIDIA's tuner CSV; exit 1 if a row has no effect.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a picture of the choices, .png or .svg.")] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            help="Without MACHINE: a fabric of `zerotune hardware` or its file, instead of this machine; a machine's"
            " name or topology file stands for MACHINE.",
            autocompletion=completion.described,
        ),
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """Show NCCL's choices on a described cluster, or what a job that began now would run. Needs no GPU.

    Example: zerotune predict dgx_h100 --nodes 2

    From what was learned: zerotune predict --nodes 1,2,4,8

    Of a machine to emulate: zerotune predict --fabric h100_ib_16
    """
    from ....agent.nccl.twin.machines import MACHINES

    if topology is None and fabric is not None and (fabric in MACHINES or fabric.endswith(".xml")):
        topology, fabric = fabric, None
    counts, n_bytes = None if nodes is None else _counts(nodes), None if sizes is None else _sizes(sizes)
    if topology is None:
        of_a_machine = {
            "--gpu": gpu, "--nic-gbps": nic_gbps, "--library": library,
            "--against": against, "--plan": plan, "--picture": picture,
        }  # fmt: skip
        for option, value in of_a_machine.items():
            if value is not None:
                raise UserError(f"{option} is useless without a machine", "name one of `zerotune hardware`")
        _of_the_store(fabric, store, counts, n_bytes, collective, ranks_per_node, as_json=as_json)
        return
    if fabric is not None:
        raise UserError(f"both {topology} and --fabric {fabric} name a machine", "give one of them")
    _of_the_library(
        topology, counts or [1], n_bytes or _sizes("1K:1G"), collective, ranks_per_node, gpu, nic_gbps,
        library, against, plan, picture, as_json=as_json,
    )  # fmt: skip


def _of_the_store(
    fabric: str | None,
    store: Path | None,
    counts: list[int] | None,
    n_bytes: list[int] | None,
    collective: list[str] | None,
    ranks_per_node: int | None,
    *,
    as_json: bool,
) -> None:
    from ....agent.nccl.catalog import parse_collective
    from ...offline.choice_table import choice_table
    from ...offline.choice_table_shown import render

    wanted = [parse_collective(name) for name in dict.fromkeys(collective or _TUNED)]
    found = choice_table(store_path(store), fabric, counts, n_bytes, wanted, ranks_per_node)
    print_json(found) if as_json else render(found, console())


def _of_the_library(
    topology: str,
    counts: list[int],
    n_bytes: list[int],
    collective: list[str] | None,
    ranks_per_node: int | None,
    gpu: str | None,
    nic_gbps: float | None,
    named_library: Path | None,
    against: Path | None,
    plan: Path | None,
    picture: Path | None,
    *,
    as_json: bool,
) -> None:
    from ....agent.nccl.mock_cuda.machine import connect, read_machine
    from ....agent.nccl.twin.twin import Cluster, topology_file
    from ....store.records import Collective
    from ...advice.hardware.gpus import gpu as find_gpu
    from ...offline.nccl_choices import choices, render

    if plan is not None and against is not None:
        raise UserError("--plan and --against ask for two things", "give one of them")
    if len(counts) > 1 and (plan, against, picture) != (None, None, None):
        raise UserError("--plan, --against and --picture are of one cluster", "name one node count")
    wanted = [Collective[_known(name)] for name in collective or _TUNED]
    found = []
    with topology_file(topology, find_gpu(gpu).capability if gpu else None, nic_gbps) as path:
        library = nccl_library(named_library)
        for n_nodes in counts:
            machine = read_machine(path)
            connect(machine, topology, n_nodes)
            cluster = Cluster(path, n_nodes, ranks_per_node or len(machine.gpus))
            if plan is not None:
                _judge(plan, cluster, library, as_json=as_json)
            found.append(choices.ask(library, cluster, wanted, n_bytes))
        after = choices.ask(nccl_library(against), cluster, wanted, n_bytes) if against is not None else None
    before = found[0]
    if picture is not None:
        from ...offline.nccl_choices.picture import picture_of
        from ...offline.plots import save

        save(picture_of(before), output_file(picture))
    if after is not None:
        changed = list(choices.changes(before, after))
        if as_json:
            print_json({"before": before, "after": after, "changes": changed})
        else:
            render.show([render.changes_table(before, after, changed)], console())
    elif as_json:
        print_json(before if len(found) == 1 else found)
    else:
        render.show([render.choices_table(one) for one in found], console())


def _judge(plan: Path, cluster: Cluster, library: Path, *, as_json: bool) -> None:
    """Print the effect of each row of a plan on the cluster; exit code 1 if one has none."""
    from ....store.records import CommunicatorClass
    from ...offline.nccl_choices import plan_check, render
    from ...offline.replay.plans import plan_rows

    rows = plan_rows(plan, [CommunicatorClass(cluster.n_ranks, cluster.n_nodes)])
    judged = plan_check.judge(library, cluster, rows if plan.suffix == ".json" else plan_check.without_phases(rows))
    print_json(judged) if as_json else render.show([render.plan_table(judged)], console())
    raise typer.Exit(0 if all(row.effect.does_something for row in judged) else 1)


def _known(name: str) -> str:
    if name not in _COLLECTIVES:
        raise UserError(f"{name!r} is no collective that NCCL tunes", f"use {', '.join(_COLLECTIVES)}")
    return name


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 9 and 1 <= int(part) <= _MAX_NODES for part in parts):
        raise UserError(f"--nodes {text!r} is no list of node counts", "write them as 1,2,4,8")
    return sorted({int(part) for part in parts})


def _sizes(text: str) -> list[int]:
    try:
        if ":" not in text:
            return sorted({parse_bytes(part) for part in text.split(",")})
        low, high = (parse_bytes(part) for part in text.split(":", 1))
    except ValueError as error:
        raise UserError(f"--sizes {text!r}: {error}", "write 1K:1G, or 64K,1M") from error
    if low > high:
        raise UserError(f"--sizes {text!r} ends before it begins", "exchange them")
    return [low << place for place in range(64) if low << place <= high]
