"""One self-contained HTML page about a job: what was tuned, what came of it, and how far to trust that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zerotune.tuner.offline.report.facts import Facts, gather
from zerotune.tuner.offline.report.page import page, write_page

__all__ = ["Facts", "gather", "page", "write_page", "write_report"]


def write_report(
    store_path: Path,
    out: Path,
    job_id: str | None = None,
    summaries: Sequence[Path] = (),
    traces: Sequence[Path] = (),
) -> Path:
    """Write the page about a job.

    Args:
        job_id: id or name of the job; None: the newest that trained.
        summaries: none, or two files of `launch --summary`: the runs before and after.
        traces: folders of `launch --log-trace`, of one or two runs, for timelines of a step.

    Returns:
        `out`.

    Raises:
        StoreError: the store cannot be read.
        UserError: no such store, job or summary, or `out` cannot be written.
        TraceError: a trace cannot be read.
    """
    return write_page(gather(store_path, job_id, summaries, traces), out)
