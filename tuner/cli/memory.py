"""`zerotune memory`."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli.options import console


def memory(
    model: Annotated[str | None, typer.Option(help="Number of parameters, e.g. 7.5B.")] = None,
    ranks: Annotated[int, typer.Option(help="Ranks that share the model.")] = 64,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adam, sgd, momentum, ...")] = "adam",
    overlap: Annotated[bool, typer.Option("--overlap", help="Show where gathers stop hiding, by ranks.")] = False,
    layer_mib: Annotated[float, typer.Option(help="With --overlap: size of one layer.")] = 400.0,
    compute_us: Annotated[float, typer.Option(help="With --overlap: compute per layer.")] = 9000.0,
) -> None:
    """Memory and communication that each ZeRO stage needs; without --model the paper's tables.

    Example: zerotune memory --model 7.5B --ranks 64
    """
    from tuner import memory_report

    out = console()
    if overlap:
        memory_report.render_overlap(layer_mib * 2**20, compute_us, out)
    elif model is None:
        memory_report.render_paper_tables(out)
    else:
        memory_report.render_model(model, ranks, precision, optimizer, out)
