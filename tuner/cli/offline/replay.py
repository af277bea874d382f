"""`zerotune replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import completion
from ..options import AsJson, JobOfTrace, StorePath, console, progress_console
from ..paths import store_path
from ..sizes import megabytes
from .import_ import CollectiveName, FormatName, collective_named


def replay(
    trace: Annotated[Path, typer.Argument(help="A trace folder of `launch --log-trace`, or another format's file.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="baseline, table, model, oracle (these by default); nearest, ucb, thompson, tuner; several times.",
            show_default=False,
            autocompletion=completion.policies,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Table of policy `table`: our plan file; NVIDIA's, RCCL's, NCCLX's or scitix's table."),
    ] = None,
    store: StorePath = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            help="Fabric that the trace ran on, if it does not say: name or file, for predictions.",
            autocompletion=completion.fabrics,
        ),
    ] = None,
    format_name: FormatName = None,
    collective: CollectiveName = None,
    n_ranks: Annotated[
        int | None, typer.Option("--ranks", help="What if the job had this many ranks (to 16,384)?", show_default=False)
    ] = None,
    on_fabric: Annotated[
        str | None,
        typer.Option(
            help="What if it ran on this fabric (name or file; its `belief` is used)?",
            autocompletion=completion.fabrics,
        ),
    ] = None,
    bucket: Annotated[
        int | None,
        typer.Option(
            "--bucket-mb",
            help="What if gradients went in buckets of this size (MB: 10^6 bytes; or e.g. 25MiB)?",
            parser=megabytes,
            metavar="SIZE",
        ),
    ] = None,
    stage: Annotated[int | None, typer.Option(help="What if it were ZeRO stage 1, 2, 3, or 0 for plain DDP?")] = None,
    job: JobOfTrace = None,
    as_json: AsJson = False,
) -> None:
    """Judge policies on a recorded trace: what would each have cost, and by which evidence?

    Example: zerotune replay traces/ --policy baseline --policy model

    What if: zerotune replay traces/ --ranks 1024 --on-fabric h100_ib_16 --bucket-mb 50 --stage 2
    """
    from ....agent.nccl import fabric as fabrics
    from ...offline import replay as replaying
    from ...offline.jobs.finding import id_of

    change = replaying.JobChange(
        n_ranks=n_ranks,
        fabric=None if on_fabric is None else fabrics.load(on_fabric),
        bucket_bytes=bucket,
        stage=stage,
    )
    with progress_console().status(f"replaying {trace}"):
        result = replaying.replay(
            trace,
            policy or replaying.DEFAULT_POLICIES,
            store_path(store) if store is None else replaying.named_store(store_path(store), trace),
            fabric,
            plan,
            change,
            format_name=format_name,
            collective=collective_named(collective),
            job_id=id_of(store_path(store), job),
        )
    if as_json:
        print(result.to_json())
        return
    replaying.render(result, console())
