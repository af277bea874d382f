"""`zerotune advise --memory --overlap`: the number of ranks up to which a layer's gather hides behind computation.

A ring's latency grows with every rank and computation does not, so stage 3 stops overlapping at some number of ranks.
Times come from NCCL's own cost model on a fabric file's topology, extended to more nodes. Nothing is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from ...agent.nccl import cost_model, fabric
from ...agent.nccl.fabric_model import Fabric
from ...store.errors import UserError
from ...store.records import Candidate, Collective

RANKS = (8, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True)
class Gather:
    """One layer's all-gather: NCCL's choice and its model's predicted time."""

    chosen: Candidate
    cost_us: float


def gather(machine: Fabric, n_ranks: int, layer_bytes: float) -> Gather:
    """Predict the all-gather of one layer of `layer_bytes`, on as many nodes as the ranks fill.

    The fabric is extended beyond its number of nodes if necessary.
    """
    wider = machine.with_nodes(max(machine.max_nodes, -(-n_ranks // machine.ranks_per_node)))
    topology, message_bytes = wider.topology(wider.communicator(range(n_ranks))), round(layer_bytes)
    chosen = cost_model.default_choice(topology, Collective.all_gather, message_bytes)
    table = cost_model.cost_table(topology, Collective.all_gather, message_bytes)
    return Gather(chosen, float(table[table >= 0].min()))  # NCCL chooses the cheapest entry


class Overlap(msgspec.Struct, frozen=True):
    """A layer's gather among `n_ranks` and within groups, beside the forward that should hide them."""

    n_ranks: int
    setting: str
    gather_us: float
    is_hidden: bool
    n_grouped: int
    group_setting: str
    group_gather_us: float
    is_group_hidden: bool
    states_per_rank: float
    """Ratio of a rank's model states: hybrid sharding to sharding among all ranks."""


class OverlapReport(msgspec.Struct, frozen=True):
    """Predicted gathers of one layer on one machine."""

    fabric: str
    layer_bytes: float
    n_tokens: int
    forward_us: float
    ranks_per_group: int
    rows: tuple[Overlap, ...]


def overlaps(name: str, layer_parameters: float, n_tokens: int, ranks_per_group: int) -> OverlapReport:
    """Gathers of one layer, among all ranks and within groups, against the forward pass that should hide them.

    There is one row for each number of ranks in RANKS. `name` may be the path of a fabric file.

    Raises:
        UserError: there is no such fabric, a count is below one, or the groups do not divide the ranks.
    """
    for what, count in (("tokens", n_tokens), ("ranks per group", ranks_per_group)):
        if count < 1:
            raise UserError(f"{count} {what} is too few", "choose 1 or more")
    undivided = next((n for n in RANKS if n > ranks_per_group and n % ranks_per_group), None)
    if undivided is not None:
        raise UserError(f"groups of {ranks_per_group} do not divide {undivided} ranks", "choose a power of two")
    machine = fabric.load(name)
    layer_bytes = layer_parameters * _ELEMENT_BYTES
    forward_us = machine.compute.matmul_us(2 * layer_parameters * n_tokens)
    rows = []
    for n_ranks in RANKS:
        n_grouped = min(n_ranks, ranks_per_group)
        over_all, grouped = gather(machine, n_ranks, layer_bytes), gather(machine, n_grouped, layer_bytes)
        rows.append(
            Overlap(
                n_ranks,
                str(over_all.chosen),
                over_all.cost_us,
                over_all.cost_us <= forward_us,
                n_grouped,
                str(grouped.chosen),
                grouped.cost_us,
                grouped.cost_us <= forward_us,
                n_ranks / n_grouped,
            )
        )
    return OverlapReport(name, layer_bytes, n_tokens, forward_us, ranks_per_group, tuple(rows))


def render(found: OverlapReport, console: Console) -> None:
    """Print the table."""
    table = Table(
        "ranks", "sharded over all", "hidden", f"within groups of {found.ranks_per_group}", "hidden",
        "states per rank",
        title=f"{found.layer_bytes / 1e6:,.0f} MB gathered behind {found.forward_us:,.0f} us of forward "
        f"({found.n_tokens:,} tokens per rank); {found.fabric}; predicted by NCCL's cost model, not measured",
    )  # fmt: skip
    for row in found.rows:
        table.add_row(
            f"{row.n_ranks:,}",
            f"{row.gather_us:,.0f} us ({row.setting})", "yes" if row.is_hidden else "no",
            f"{row.group_gather_us:,.0f} us ({row.group_setting})", "yes" if row.is_group_hidden else "no",
            f"{row.states_per_rank:g} times",
        )  # fmt: skip
    console.print(table)
