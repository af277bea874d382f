"""What `zerotune import` prints: what was found, what could not be used, and why."""

from __future__ import annotations

import json
from collections import Counter
from typing import Final

from rich.console import Console

from zerotune.store.counted import counted
from zerotune.tuner.traces import Trace
from zerotune.tuner.traces.left_out import LeftOut

OWN_FORMAT: Final = "zerotune"


def left_out(trace: Trace) -> dict[LeftOut, int]:
    """Reason -> records that are no measurement, most first.

    Our own traces have a record of each decision beside that of the timed collective; only what was decided more
    often than timed can have been missed.
    """
    counts = trace.summary.unusable.copy()
    if trace.format_name == OWN_FORMAT:
        n_untimed = counts.pop(LeftOut.no_duration, 0)
        n_decisions = min(n_untimed, trace.summary.n_timed)
        counts += Counter({LeftOut.decision: n_decisions, LeftOut.no_duration: n_untimed - n_decisions})
    return dict(counts.most_common())


def to_json(trace: Trace, n_rows: int, *, dry_run: bool) -> str:
    """What `render` prints, as one JSON document.

    Args:
        trace: read to its end.
        n_rows: measurements recorded, or usable in a dry run.
        dry_run: whether nothing was recorded.

    Returns:
        The document's text.
    """
    summary = trace.summary
    document = {
        "format": trace.format_name,
        "n_files": summary.n_files,
        "n_records": summary.n_records,
        "n_timed": summary.n_timed,
        "n_settings": summary.n_settings,
        "n_joined": summary.n_joined,
        "n_measurements": n_rows,
        "recorded": not dry_run,
        "fabrics": summary.fabrics,
        "left_out": {reason.name: count for reason, count in left_out(trace).items()},
        "examples": {reason.name: examples for reason, examples in summary.examples.items()},
        "notes": summary.remarks,
        "facts": summary.facts,
    }
    return json.dumps(document, default=str)


def render(trace: Trace, n_rows: int, console: Console, *, dry_run: bool) -> None:
    """Print what was found, what could not be used, and why.

    Args:
        trace: read to its end.
        n_rows: measurements recorded, or usable in a dry run.
        console: where to print.
        dry_run: whether nothing was recorded.
    """
    summary = trace.summary
    for fault in summary.faults:  # ahead of figures that lack something
        console.print(fault, style="yellow", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"{trace.title}: {counted(summary.n_records, 'record')} in {counted(summary.n_files, 'file')},"
        f" {summary.n_timed:,} timed, {summary.n_settings:,} say which setting ran"
    )
    if summary.n_joined:
        console.print(f"joined over ranks: {summary.n_joined:,} timed records")
    where = f" on fabric {', '.join(summary.fabrics)}" if summary.fabrics else ""
    if summary.is_named_after_folder:
        where += ", named after the folder (--fabric-id says another name)"
    console.print(f"{'usable' if dry_run else 'recorded'} as measurements: {n_rows:,}{where}")
    for reason, count in left_out(trace).items():
        # Nothing is missed for want of a decision's record, and half of all would look as if it were.
        console.print(
            f"  beside them: {count:,} {reason.value}"
            if reason is LeftOut.decision
            else f"  left out: {count:,} ({summary.with_examples(reason)})"
        )
    for note in summary.notes:
        console.print(f"  note: {note}")
