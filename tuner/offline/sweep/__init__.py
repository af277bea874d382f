"""Measures settings x sizes x collectives in one process group by switching plans, and records them."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .compare import SweepComparison, compare, render_comparison
from .render import progress_bar, render
from .request import SweepRequest, check
from .result import SweepResult, SweepRow
from .run import run_sweep
from .strategy import BUDGET

__all__ = [
    "BUDGET",
    "SweepComparison",
    "SweepRequest",
    "SweepResult",
    "SweepRow",
    "check",
    "compare",
    "render",
    "render_comparison",
    "run_sweep",
    "sweep",
]


def sweep(request: SweepRequest, store_path: Path, console: Console) -> SweepResult:
    """Run a sweep with a progress bar, as `run_sweep` does."""
    check(request)  # mistakes are reported before a bar is shown
    with progress_bar(console) as progress:
        return run_sweep(request, store_path, progress)
