"""Choices as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from ..size_ranges import size_text
from .choices import ChoiceChange, Choices
from .plan_check import JudgedRow, RowEffect

_N_RIVALS: Final = 3
_WORDS: Final = {
    RowEffect.applies: "applies",
    RowEffect.fewer_channels: "applies, on fewer channels",
    RowEffect.ignored: "does nothing: NCCL does not offer it here",
    RowEffect.never_matches: "does nothing: no call here can match it",
}


def headline(found: Choices) -> str:
    """Who decided, and where."""
    ranks = f"{found.n_nodes} x {found.ranks_per_node} ranks"
    return f"NCCL {found.nccl} on {found.topology}, {ranks} (its own library, no GPU: choices and estimates, no times)"


def choices_table(found: Choices) -> Table:
    """One line per collective and size."""
    table = Table("collective", "size", "NCCL takes", "its estimate", "next best", title=headline(found))
    for choice in found.choices:
        estimate = "" if choice.estimate_us is None else f"{choice.estimate_us:,.1f} us"
        rivals = [
            offer for offer in choice.offers if (offer.algorithm, offer.protocol) != (choice.algorithm, choice.protocol)
        ]
        text = ", ".join(f"{one.algorithm}/{one.protocol} {one.estimate_us:,.1f}" for one in rivals[:_N_RIVALS])
        table.add_row(choice.collective, size_text(choice.message_bytes), choice.setting(), estimate, text)
    return table


def changes_table(before: Choices, after: Choices, changed: Sequence[ChoiceChange]) -> Table:
    """What an upgrade changes.

    Args:
        changed: where they differ.

    Returns:
        One line per call that is treated otherwise.
    """
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
