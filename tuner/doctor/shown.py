"""The output of `zerotune doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...store.counted import counted
from .findings import Finding, Status

STYLES: Final = {Status.ok: "green", Status.warning: "yellow", Status.problem: "bold red"}


def render(findings: Sequence[Finding], console: Console) -> None:
    """Print one line for each check, with the remedy below the finding."""
    table = Table("check", "status", "found, and what to do", box=None)
    for one in findings:
        words = escape(one.found) + (f"\n[bold]{escape(one.remedy)}[/]" if one.remedy else "")
        table.add_row(one.code, f"[{STYLES[one.status]}]{one.status.value}[/]", words)
    console.print(table)
    n_problems, n_warnings = (
        sum(one.status is which for one in findings) for which in (Status.problem, Status.warning)
    )
    console.print(f"\n{counted(n_problems, 'problem')}, {counted(n_warnings, 'warning')}")
