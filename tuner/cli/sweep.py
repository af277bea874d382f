"""`zerotune sweep`."""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli.options import AsJson, FabricName, StorePath, console, store_path


def sweep(
    fabric: FabricName = None,
    store: StorePath = None,
    n_ranks: Annotated[int, typer.Option(help="Ranks to start on this machine.")] = 2,
    collective: Annotated[
        list[str], typer.Option(help="Collectives to measure; may be given several times.")
    ] = ["all_gather", "reduce_scatter"],  # noqa: B006 - as above
    min_bytes: Annotated[int, typer.Option(help="Smallest message, total bytes.")] = 4096,
    max_bytes: Annotated[int, typer.Option(help="Largest message, total bytes.")] = 64 * 2**20,
    full: Annotated[bool, typer.Option("--full", help="Measure the whole grid.")] = False,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Measure nothing: compare two sweeps, by job id or fabric id.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure settings x sizes x collectives in one process group and record them.

    Ctrl-C keeps what was measured; the same command goes on from there.

    Example: zerotune sweep --fabric ethernet_boxes --max-bytes 1048576
    """
    from tuner import sweep as sweeping

    if compare is not None:
        from tuner.sweep.compare import compare as compare_sweeps
        from tuner.sweep.compare import render_comparison

        render_comparison(compare_sweeps(store_path(store), *compare), console())
        return
    result = sweeping.sweep(
        sweeping.SweepRequest(
            fabric=fabric,
            n_ranks=n_ranks,
            collectives=tuple(collective),
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            full=full,
        ),
        store_path(store),
        console(),
    )
    if as_json:
        print(result.to_json())
        return
    sweeping.render(result, console())
