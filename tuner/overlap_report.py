"""`zerotune memory --overlap`: up to how many ranks a layer's gather hides behind the layer before it.

A ring's latency grows with every rank, computation does not, so at some number of ranks stage 3 stops overlapping.
Times are NCCL's own cost model's on the topology that a fabric file states, its number of nodes extended; nothing
is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from agent.nccl import cost_model, fabric
from store.errors import UserError
from store.records import Candidate, Collective

RANKS = (8, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ELEMENT_BYTES = 2  # bf16


@dataclass(frozen=True)
class Gather:
    """One layer's all-gather: what NCCL chooses for it, and what NCCL thinks that it takes."""

    chosen: Candidate
    cost_us: float

    def __str__(self) -> str:
        return f"{self.cost_us:,.0f} us ({self.chosen})"


def gather(machine: fabric.Fabric, n_ranks: int, layer_bytes: float) -> Gather:
    """A layer gathered among `n_ranks` of as many nodes as they fill."""
    wider = machine.with_nodes(max(machine.max_nodes, -(-n_ranks // machine.ranks_per_node)))
    topology, message_bytes = wider.topology(wider.communicator(range(n_ranks))), round(layer_bytes)
    chosen = cost_model.default_choice(topology, Collective.all_gather, message_bytes)
    table = cost_model.cost_table(topology, Collective.all_gather, message_bytes)
    return Gather(chosen, float(table[table >= 0].min()))  # the choice is the cheapest cell


def render(name: str, layer_parameters: float, n_tokens: int, ranks_per_group: int, console: Console) -> None:
    """Gathers of one layer, among all ranks and within groups, against the forward that hides them.

    Raises:
        UserError: there is no such fabric, or a count is below one.
    """
    for what, count in (("tokens", n_tokens), ("ranks per group", ranks_per_group)):
        if count < 1:
            raise UserError(f"{count} {what} is too few", "choose 1 or more")
    machine = fabric.load(name)
    layer_bytes = layer_parameters * _ELEMENT_BYTES
    compute_us = machine.compute.matmul_us(2 * layer_parameters * n_tokens)
    table = Table(
        "ranks", "sharded over all", "hidden", f"within groups of {ranks_per_group}", "hidden", "states per rank",
        title=f"{layer_bytes / 2**20:,.0f} MiB gathered behind {compute_us:,.0f} us of forward "
        f"({n_tokens:,} tokens per rank); {name}; predicted by NCCL's cost model, not measured",
    )  # fmt: skip
    for n_ranks in RANKS:
        row = [f"{n_ranks:,}"]
        for n_sharing in (n_ranks, min(n_ranks, ranks_per_group)):
            found = gather(machine, n_sharing, layer_bytes)
            row += [str(found), "yes" if found.cost_us <= compute_us else "no"]
        table.add_row(*row, f"{n_ranks / min(n_ranks, ranks_per_group):g} times")
    console.print(table)
