"""`zerotune sweep`."""

from __future__ import annotations

from typing import Annotated

import typer

from ....store.errors import UserError
from .. import completion
from ..options import AsJson, FabricName, StorePath, console, progress_console, sigterm_like_ctrl_c
from ..paths import store_path
from ..sizes import a_size, share


def sweep(
    fabric: FabricName = None,
    store: StorePath = None,
    ranks: Annotated[int, typer.Option(help="Ranks to start on this machine.")] = 2,
    collective: Annotated[
        list[str],
        typer.Option(
            help="Of all_gather, reduce_scatter, all_reduce and broadcast; repeat it.", autocompletion=completion.swept
        ),
    ] = [  # noqa: B006 - nobody changes the default
        "all_gather",
        "reduce_scatter",
    ],
    min_bytes: Annotated[
        int, typer.Option(help="Smallest message, total bytes: 4096, 4KiB, 4K.", parser=a_size, metavar="SIZE")
    ] = 4096,
    max_bytes: Annotated[
        int, typer.Option(help="Largest message, total bytes: 16MB, 16MiB, 1e6.", parser=a_size, metavar="SIZE")
    ] = 64 * 2**20,
    full: Annotated[bool, typer.Option("--full", help="Measure the whole grid.")] = False,
    half_width: Annotated[
        float,
        typer.Option(
            help="Wanted half width of a median's 95 % interval, as a share; smaller differences are ties.",
            parser=share,
            metavar="SHARE",
        ),
    ] = 0.03,
    chunk_bytes: Annotated[
        list[int],
        typer.Option(
            help="With --full, NCCL 2.30 and newer: chunk size to try besides NCCL's own; repeat it.",
            parser=a_size,
            metavar="SIZE",
        ),
    ] = [],  # noqa: B006 - typer reads the default, nobody changes it
    max_repeats: Annotated[int, typer.Option(help="Most samples of one setting at one size.")] = 30,
    timeout: Annotated[float, typer.Option(help="Seconds after which a setting counts as hung.")] = 30.0,
    samples_share: Annotated[
        float | None,
        typer.Option(
            help="Without --full: most samples, as a share of the whole grid's; default: 0.125.",
            parser=share,
            metavar="SHARE",
        ),
    ] = None,
    check: Annotated[bool, typer.Option(help="Verify the result of each setting once; --no-check trusts it.")] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what earlier sweeps of this fabric recorded.")
    ] = False,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="Measure nothing: compare two sweeps, by job id or fabric id.",
            metavar="ID ID",
            autocompletion=completion.jobs,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure settings x sizes x collectives in one process group and record them.

    Ctrl-C keeps all measurements; the same command then goes on. A setting that hangs or gives a wrong result is
    recorded as broken and never tried again.

    Example: zerotune sweep --fabric ethernet_boxes --max-bytes 1MiB

    Before and after an update: zerotune sweep --compare sweep-20261121-105757 sweep-20261122-090000
    """
    from ...offline import sweep as sweeping

    if compare is not None:
        if fabric is not None or full or fresh or samples_share is not None:
            raise UserError("--compare measures nothing", "leave --fabric, --full, --fresh and --samples-share out")
        comparison = sweeping.compare(store_path(store), *compare)
        if as_json:
            print(comparison.to_json())
        else:
            sweeping.render_comparison(comparison, console())
        return
    if full and samples_share is not None:
        raise UserError(
            f"a full sweep takes all samples, whatever --samples-share {samples_share:g}", "leave one of them out"
        )
    request = sweeping.SweepRequest(
        fabric=fabric,
        n_ranks=ranks,
        collectives=tuple(collective),
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        full=full,
        precision=half_width,
        max_repeats=max_repeats,
        timeout_s=timeout,
        budget=sweeping.BUDGET if samples_share is None else samples_share,
        check=check,
        fresh=fresh,
        chunk_sizes=tuple(dict.fromkeys(chunk_bytes)),
    )
    with sigterm_like_ctrl_c():
        result = sweeping.sweep(request, store_path(store), progress_console())
    if as_json:
        print(result.to_json())
    else:
        sweeping.render(result, console())
    if result.interrupted:
        raise typer.Exit(130)
    if result.gave_up:
        raise typer.Exit(1)
