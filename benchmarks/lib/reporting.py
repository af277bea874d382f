"""The output of every benchmark: a table; with --json one line of JSON on stdout, and the table on stderr."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import operator
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

COMPARISONS: Final[dict[str | None, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    None: operator.eq,
}
NUMBER: Final = r"-?\d+(?:\.\d+)?"
TARGET: Final = re.compile(rf"(?:(<=|>=|<|>) )?({NUMBER})(?: to ({NUMBER}))?")
"""`<= 5`, `> 0`, `19`, or `88 to 92`."""


@dataclass(frozen=True)
class Result:
    """One figure, NaN if it is unknown. `target` is "<= 100", "> 0", "85 to 95" or "0"; `ratio` is over the peer's."""

    metric: str
    value: float
    unit: str
    target: str = ""
    peer: str = ""
    ratio: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", math.nan if self.value is None else self.value)  # None: read from JSON

    def as_json(self) -> dict[str, Any]:
        """NaN becomes null."""
        return {**asdict(self), "value": None if math.isnan(self.value) else self.value}

    @property
    def is_met(self) -> bool | None:
        """Whether the value meets the target; None if there is no target or no value."""
        if not self.target or math.isnan(self.value):
            return None
        found = TARGET.fullmatch(self.target)
        if found is None:
            raise ValueError(f"{self.metric}: {self.target!r} is no target")
        compare, limit, upper = found.groups()
        if upper is not None:
            return float(limit) <= self.value <= float(upper)
        return COMPARISONS[compare](self.value, float(limit))


def options_of(description: str | None, *, quick: str = "") -> argparse.ArgumentParser:
    """A parser with --json, and with --quick if `quick` describes it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    return parser


@cache
def say(text: str) -> None:
    """Print a text to stderr, once even if it is repeated."""
    print(text, file=sys.stderr, flush=True)


def processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor()


def environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": processor(),
        "n_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "torch": importlib.metadata.version("torch"),
        "zerotune": importlib.metadata.version("zerotune"),
        "load": round(os.getloadavg()[0], 2),
    }


def figure(value: float) -> str:
    """A value for people: four digits, thousands apart."""
    if math.isnan(value):
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def report(benchmark: str, results: Sequence[Result], *, as_json: bool) -> None:
    """Print the figures as a table, with missed targets in bold; `as_json`: a line of JSON, and the table to stderr."""
    if as_json:
        document = {
            "benchmark": benchmark,
            "environment": environment(),
            "results": [result.as_json() for result in results],
        }
        print(json.dumps(document))
    table = Table("metric", "value", "unit", "target", "peer", "ratio", title=benchmark)
    for result in results:
        ratio = "" if result.ratio is None else f"{result.ratio:.3g}"
        style = "bold" if result.is_met is False else None
        table.add_row(result.metric, figure(result.value), result.unit, result.target, result.peer, ratio, style=style)
    Console(width=140, stderr=as_json).print(table)
