"""`zerotune stage`: look at the stage fingerprint's weights, try it on a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....store.errors import UserError
from ..options import AsJson, JobOfTrace, console, print_json, progress_console
from ..paths import store_path
from .import_ import FormatName

if TYPE_CHECKING:
    from ...fingerprint.labels import Shown
    from ...offline.stage_command import Recognition

stage = typer.Typer(
    help="""The stage fingerprint: show its weights, test it on a trace.

    Example: zerotune stage test traces/job.rank00000.zttrace""",
    no_args_is_help=True,
)


@stage.command()
def show(as_json: AsJson = False) -> None:
    """Show the weights that a daemon uses.

    Example: zerotune stage show
    """
    from ...offline import stage_command

    one = stage_command.shipped_weights()
    if as_json:
        print_json([one])
        return
    from rich.table import Table

    table = Table("encoder", "from", "bytes", "sha256", "state", "used")
    table.add_row(one.encoder, one.origin, f"{one.n_bytes:,}", one.sha256[:12], one.state, "yes" if one.is_used else "")
    console().print(table)


@stage.command(name="test")
def try_trace(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Traces of any known format: files, or folders of rank files. Several jobs are read one after another."
        ),
    ],
    rank: Annotated[int | None, typer.Option(help="Whose sequence is read; default: the first rank in it.")] = None,
    job: JobOfTrace = None,
    format_name: FormatName = None,
    as_json: AsJson = False,
) -> None:
    """Say what kind of training a trace shows, and when that was known.

    With several traces, --json prints a list.

    Example: zerotune stage test traces/job.rank00000.zttrace
    """
    from ...client.status import in_words
    from ...offline import stage_command
    from ...offline.jobs.finding import id_of

    for trace in traces:
        if not trace.exists():
            raise UserError(f"{trace} does not exist", "name a trace file or a folder of traces")
    with progress_console().status(f"reading {', '.join(map(str, traces))}"):
        readings = stage_command.read_several(traces, rank, id_of(store_path(None), job), format_name)
    if as_json:
        documents = [_document(one) for one in readings]
        print_json(documents if len(traces) > 1 else documents[0])
        return
    out = console()
    for one in readings:
        if len(traces) > 1:
            out.print(f"{one.trace}{f', job {one.job_id}' if one.job_id else ''}:", markup=False, soft_wrap=True)
        for fault in one.faults:
            out.print(fault, style="yellow", markup=False, highlight=False, soft_wrap=True)
        for n_calls, shown in one.changes:
            out.print(f"after {n_calls:,} calls: {shown}")
        why = f" ({in_words(one.missing_evidence)})" if one.missing_evidence else ""
        unsized = f" and {one.n_unsized:,} of unknown size" if one.n_unsized else ""
        out.print(f"{one.n_calls:,} calls{unsized}, {one.period:,} per step: {one.shown}{why}")


def _document(one: Recognition) -> dict[str, object]:
    return {
        "trace": one.trace,
        "job": one.job_id,
        "n_calls": one.n_calls,
        "n_unsized": one.n_unsized,
        "calls_per_step": one.period,
        **_fields(one.shown),
        "missing_evidence": one.missing_evidence,
        "faults": one.faults,
        "changes": [{"n_calls": n_calls, **_fields(shown)} for n_calls, shown in one.changes],
    }


def _fields(shown: Shown) -> dict[str, str | bool | None]:
    return {
        "stage": shown.stage.name,
        "accumulation": shown.accumulation,
        "partitioned_activations": shown.partitioned_activations,
        "tensor_parallel": shown.tensor_parallel,
    }
