"""Prints choices as tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from rich.console import Console
from rich.table import Table

from ....store.counted import size_text
from .choices import ChoiceChange, Choices
from .plan_check import JudgedRow, RowEffect

_WORDS: Final = {
    RowEffect.applies: "applies",
    RowEffect.fewer_channels: "applies, on fewer channels",
    RowEffect.ignored: "does nothing: NCCL does not offer it here",
    RowEffect.never_matches: "does nothing: no call here can match it",
}


def headline(found: Choices) -> str:
    """The release and the cluster."""
    return f"NCCL {found.nccl} on {found.topology}, {found.n_nodes} x {found.ranks_per_node} ranks"


def choices_table(found: Choices) -> Table:
    """One line per collective and range of sizes with one setting; estimates are of the smallest and largest size."""
    caption = "NCCL's own library, without a GPU: its choices and estimates. The next best is of the largest size."
    table = Table("collective", "sizes", "NCCL takes", "estimate, us", "next best, us", title=headline(found))
    table.caption = caption
    for _, group in groupby(found.choices, lambda choice: (choice.collective, choice.setting())):
        alike = [*group]
        first, last = alike[0], alike[-1]
        sizes = [size_text(one.message_bytes) for one in (first, last)]
        estimates = [f"{one.estimate_us:,.1f}" for one in (first, last) if one.estimate_us is not None]
        rivals = [one for one in last.offers if (one.algorithm, one.protocol) != (last.algorithm, last.protocol)]
        rival = f"{rivals[0].algorithm}/{rivals[0].protocol} {rivals[0].estimate_us:,.1f}" if rivals else ""
        table.add_row(first.collective, _range(sizes), first.setting(), _range(estimates), rival)
    return table


def _range(ends: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


def changes_table(before: Choices, after: Choices, changed: Sequence[ChoiceChange]) -> Table:
    """The changes of an upgrade: one line per call with another choice."""
    title = f"{len(changed)} of {len(before.choices)} calls change from NCCL {before.nccl} to {after.nccl}"
    table = Table("collective", "size", f"NCCL {before.nccl}", f"NCCL {after.nccl}", title=title)
    for change in changed:
        size = size_text(change.before.message_bytes)
        table.add_row(change.before.collective, size, change.before.setting(), change.after.setting())
    return table


def plan_table(judged: Sequence[JudgedRow]) -> Table:
    """One line per row of the plan."""
    n_idle = sum(not row.effect.does_something for row in judged)
    title = f"{n_idle} of {len(judged)} rows do nothing"
    table = Table("row", "collective", "phase", "sizes", "asks for", "runs", "effect", title=title)
    for row in judged:
        sizes = f"{size_text(row.min_bytes)} to {size_text(row.max_bytes)}"
        cells = (str(row.row), row.collective, row.phase, sizes, row.asked, row.ran or "", _WORDS[row.effect])
        table.add_row(*cells, style=None if row.effect.does_something else "yellow")
    return table


def show(tables: Sequence[Table], console: Console) -> None:
    """Print tables."""
    for table in tables:
        console.print(table)
