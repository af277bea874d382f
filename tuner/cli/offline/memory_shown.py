"""`zerotune advise --memory`."""

from __future__ import annotations

from ..options import console, print_json


def show_overlaps(fabric: str | None, layer: str, tokens: int, group: int, *, as_json: bool) -> None:
    """Print up to how many ranks computation hides gathers of one `layer` (its parameters, as written).

    `tokens` are per rank and step. `group` is the number of ranks per group of hybrid sharding.
    """
    from ...offline import memory_report, overlap_report

    found = overlap_report.overlaps(fabric or "h100_ib_16", memory_report.parse_parameters(layer), tokens, group)
    print_json(found) if as_json else overlap_report.render(found, console())


def show(model: str | None, ranks: int, precision: str, optimizer: str, *, as_json: bool) -> None:
    """Print the memory of each ZeRO stage for a model on `ranks` ranks; without a model, the ZeRO paper's tables."""
    from ...offline import memory_report

    if model is None:
        print_json(memory_report.paper_tables()) if as_json else memory_report.render_paper_tables(console())
        return
    needs = memory_report.model_needs(model, ranks, precision, optimizer)
    print_json(needs) if as_json else memory_report.render_model(needs, console())
