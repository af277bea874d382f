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
    """Write the page about `job_id` (the newest that trained when None) to `out`, and return `out`.

    `summaries` are two run summaries as JSON, before and after:
    {"label", "emulated", "fabric", "n_disagreements", "steps": [{"step", "duration_us", "exposed_us", "loss_hex"}]}.
    `traces` are the --log-trace folders of one or two runs, for timelines of a step.

    Raises:
        UserError: no such store, job or summary, or `out` cannot be written.
    """
    return write_page(gather(store_path, job_id, summaries, traces), out)
