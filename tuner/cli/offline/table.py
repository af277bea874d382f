"""`zerotune table`."""

from __future__ import annotations

from typing import Annotated

import typer

from ....store.errors import UserError
from .. import completion
from ..options import AsJson, FabricName, StorePath, console, print_json
from ..paths import store_path
from ..sizes import parse_bytes

_MAX_NODES = 1 << 16
_TUNED = ("all_gather", "reduce_scatter", "all_reduce")


def table(
    nodes: Annotated[
        str | None, typer.Option(help="Node counts; default: 1,2,4,8, or those of a fabric without a network.")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Message sizes: 1K:1G doubles from the first on; or 64K,1M. Default: 1K:1G, and what was measured."
        ),
    ] = None,
    collective: Annotated[
        list[str] | None,
        typer.Option(help="Repeat it; default: the three of ZeRO.", autocompletion=completion.collectives),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="Ranks of each node; default: as the jobs had, or the fabric has.", min=1, max=_MAX_NODES),
    ] = None,
    fabric: FabricName = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """What a job that began now would run, by node count and size, and why. Needs no GPU.

    Example: zerotune table --nodes 1,2,4,8 --sizes 1K:1G

    Without any job: zerotune table --fabric h100_ib_16
    """
    from ....agent.nccl.catalog import parse_collective
    from ...offline.choice_table import choice_table
    from ...offline.choice_table_shown import render

    counts, n_bytes = None if nodes is None else _counts(nodes), None if sizes is None else _sizes(sizes)
    wanted = [parse_collective(name) for name in dict.fromkeys(collective or _TUNED)]
    found = choice_table(store_path(store), fabric, counts, n_bytes, wanted, ranks_per_node)
    print_json(found) if as_json else render(found, console())


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
