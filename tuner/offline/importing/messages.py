"""Prints the result of `zerotune store import`: what was found, what could not be used, and why."""

from __future__ import annotations

import json
from collections import Counter
from typing import Final

from rich.console import Console

from ....store.counted import counted, size_text
from ....store.records import Algorithm, CommunicatorClass, Protocol
from ...traces import Trace
from ...traces.extents import Extent
from ...traces.left_out import LeftOut

OWN_FORMAT: Final = "zerotune"
_MOST_SHOWN: Final = 12
REMEDIES: Final = {
    LeftOut.unknown_name: "mend it: numbers without units, algorithms of"
    f" {', '.join(Algorithm.__members__)}, protocols of {', '.join(Protocol.__members__)}",
    LeftOut.collective_unknown: "say with --collective what was run",
    LeftOut.no_duration: "a table needs a column of times, `latency_us` in NVIDIA's tuner CSV; NCCL's own log has none:"
    " replay it with --fabric (docs/reference/formats.md)",
    LeftOut.impossible_time: "give each row its time in microseconds (docs/reference/formats.md)",
    LeftOut.nodes_unknown: "say with --nodes on how many nodes it ran",
    LeftOut.ranks_unknown: "say with --ranks how many ranks ran, or give the table a column `ranks`",
    LeftOut.cannot_run: "mend the columns that say what ran, or measure what NCCL has (docs/reference/formats.md)",
    LeftOut.setting_unknown: "say with --default or --setting what ran",
}
"""Reason -> what the user can do about it."""


def left_out(trace: Trace) -> dict[LeftOut, int]:
    """Reason -> number of records that are no measurement, the largest first.

    Our own traces record each decision beside the timed collective. So only decisions in excess of timed collectives
    can have been missed.
    """
    counts = trace.summary.unusable.copy()
    if trace.format_name == OWN_FORMAT:
        n_untimed = counts.pop(LeftOut.no_duration, 0)
        n_decisions = min(n_untimed, trace.summary.n_timed)
        counts += Counter({LeftOut.decision: n_decisions, LeftOut.no_duration: n_untimed - n_decisions})
    return dict(counts.most_common())


def to_json(trace: Trace, n_rows: int, *, dry_run: bool) -> str:
    """What `render` prints, as one JSON document; `n_rows` were recorded, or are usable in a dry run."""
    summary = trace.summary
    document = {
        "format": trace.format_name,
        "n_files": summary.n_files,
        "n_records": summary.n_records,
        "n_timed": summary.n_timed,
        "n_settings": summary.n_settings,
        "n_joined": summary.n_joined,
        "n_measurements": n_rows,
        "measured": [extent._asdict() for extent in summary.extents],
        "recorded": not dry_run,
        "fabrics": summary.fabrics,
        "left_out": {reason.name: count for reason, count in left_out(trace).items()},
        "examples": {reason.name: examples for reason, examples in summary.examples.items()},
        "notes": summary.remarks,
        "facts": summary.facts,
    }
    return json.dumps(document, default=str)


def render(trace: Trace, n_rows: int, console: Console, *, dry_run: bool) -> None:
    """Print what was found, what could not be used, and why; `n_rows` were recorded, or are usable in a dry run."""
    summary = trace.summary
    for fault in summary.faults:  # before the incomplete figures
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
    for extent in summary.extents[:_MOST_SHOWN]:
        console.print(f"  {_words(extent)}", highlight=False)
    if len(summary.extents) > _MOST_SHOWN:
        console.print(f"  and {len(summary.extents) - _MOST_SHOWN:,} more (--json tells all)")
    for reason, count in left_out(trace).items():
        # A decision's record is not needed, and half of all records would look like a loss.
        console.print(
            f"  beside them: {count:,} {reason.value}"
            if reason is LeftOut.decision
            else f"  left out: {count:,} ({summary.with_examples(reason)})"
            + (f"; {REMEDIES[reason]}" if reason in REMEDIES else "")
        )
    for note in summary.notes:
        console.print(f"  note: {note}")


def _words(extent: Extent) -> str:
    place = CommunicatorClass(extent.n_ranks, extent.n_nodes)
    sizes = size_text(extent.min_bytes), size_text(extent.max_bytes)
    times = f"{extent.min_us:.5g}", f"{extent.max_us:.5g}"
    size, time = (" to ".join(dict.fromkeys(both)) for both in (sizes, times))
    return f"{extent.n_measurements:,} of {extent.collective} on {place}: {size} in {time} us"
