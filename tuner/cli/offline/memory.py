"""`zerotune memory`."""

from __future__ import annotations

from typing import Annotated

import typer

from ....store.errors import UserError
from .. import completion
from ..options import AsJson, console, print_json


def memory(
    model: Annotated[str | None, typer.Option(help="Number of parameters, e.g. 7.5B, or a config.json.")] = None,
    ranks: Annotated[int, typer.Option(help="With --model: ranks that share the model.", min=1)] = 64,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.", autocompletion=completion.precisions)] = "bf16",
    optimizer: Annotated[
        str, typer.Option(help="adam, sgd, momentum, ...", autocompletion=completion.optimizers)
    ] = "adam",
    overlap: Annotated[bool, typer.Option("--overlap", help="Show up to how many ranks gathers hide.")] = False,
    fabric: Annotated[
        str, typer.Option(help="With --overlap: the machine.", autocompletion=completion.fabrics)
    ] = "h100_ib_16",
    layer: Annotated[str, typer.Option(help="With --overlap: parameters of one layer.")] = "50M",
    tokens: Annotated[int, typer.Option(help="With --overlap: tokens per rank and step.", min=1)] = 4096,
    group: Annotated[int, typer.Option(help="With --overlap: ranks per group of hybrid sharding.", min=1)] = 64,
    as_json: AsJson = False,
) -> None:
    """Memory and communication that each ZeRO stage needs; without --model the paper's tables.

    Example: zerotune memory --model 7.5B --ranks 64
    """
    from ...offline import memory_report, overlap_report

    if overlap and model is not None:
        raise UserError(f"--overlap does not use --model {model}", "leave --model out, or --overlap")
    if overlap:
        found = overlap_report.overlaps(fabric, memory_report.parse_parameters(layer), tokens, group)
        if as_json:
            print_json(found)
        else:
            overlap_report.render(found, console())
    elif model is not None:
        needs = memory_report.model_needs(model, ranks, precision, optimizer)
        if as_json:
            print_json(needs)
        else:
            memory_report.render_model(needs, console())
    elif as_json:
        print_json(memory_report.paper_tables())
    else:
        memory_report.render_paper_tables(console())
