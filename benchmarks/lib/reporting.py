"""The one way every benchmark here prints: a table; with --json one line of JSON, and the table on stderr."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """One figure. `target` is a limit in words ("<= 100"); `ratio` is value over the named peer's."""

    metric: str
    value: float
    unit: str
    target: str = ""
    peer: str = ""
    ratio: float | None = None


@cache
def say(text: str) -> None:
    """Tell people something on stderr, once however often the data are read."""
    print(text, file=sys.stderr, flush=True)


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "n_cores": os.cpu_count(),
        "torch": importlib.metadata.version("torch"),
        "zerotune": importlib.metadata.version("zerotune"),
        "load": round(os.getloadavg()[0], 2),
    }


def report(benchmark: str, results: Sequence[Result], *, as_json: bool) -> None:
    """Print the figures as a table.

    Args:
        benchmark: its name.
        results: in the table's order.
        as_json: print one line of JSON, which scripts read, and the table to stderr.
    """
    table = Table("metric", "value", "unit", "target", "peer", "ratio", title=benchmark)
    for result in results:
        ratio = "" if result.ratio is None else f"{result.ratio:.3g}"
        table.add_row(result.metric, f"{result.value:,.4g}", result.unit, result.target, result.peer, ratio)
    Console(width=140, stderr=as_json).print(table)
    if as_json:
        document = {
            "benchmark": benchmark,
            "environment": environment(),
            "results": [asdict(result) for result in results],
        }
        print(json.dumps(document))
