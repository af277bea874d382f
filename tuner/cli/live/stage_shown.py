"""`zerotune explain --trace`: the kind of training that a trace shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....store.errors import UserError
from ..options import console, print_json, progress_console

if TYPE_CHECKING:
    from ...fingerprint.labels import Shown
    from ...offline.stage_command import Recognition


def show(
    traces: Sequence[Path], store: Path, rank: int | None, job: str | None, format_name: str | None, *, as_json: bool
) -> None:
    """Print the kind of training that each trace shows, and the call after which it was known."""
    from ...client.status import in_words
    from ...offline import stage_command
    from ...offline.jobs.finding import id_of

    for trace in traces:
        if not trace.exists():
            raise UserError(f"{trace} does not exist", "name a trace file or a folder of traces")
    with progress_console().status(f"reading {', '.join(map(str, traces))}"):
        readings = stage_command.read_several(traces, rank, id_of(store, job), format_name)
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
