"""Settings x sizes x collectives, measured in one process group by switching plans, recorded in the store."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from .compare import SweepComparison, compare, render_comparison
from .render import progress_bar, render
from .result import SweepResult, SweepRow
from .run import SweepRequest, check, run_sweep
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
    """Run a sweep with a progress bar.

    Args:
        store_path: the SQLite file; made if need be.

    Returns:
        What the store then knows of the sweep's points.

    Raises:
        UserError: the request cannot be carried out here, or the workers do not start.
        StoreError: the store cannot be written.
    """
    check(request)  # a mistake is told before there is a bar
    with progress_bar(console) as progress:
        return run_sweep(request, store_path, progress)
