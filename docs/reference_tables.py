"""What the reference pages say of commands and metrics, read off the code.

`python -m docs.reference_tables` renews it in docs/reference/; tests/docs/test_tables.py holds the pages to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from prometheus_client.core import Metric

from zerotune.store.records import Stage
from zerotune.store.records.lateness import Lateness, LateRank, SlowCommunicator
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.store.wire import JobStatus, StatusReply
from zerotune.tuner.cli.app import command_line
from zerotune.tuner.metrics.collector import Collector

FOLDER: Final = Path(__file__).parent / "reference"
BEGIN, END = "<!-- made by docs/reference_tables.py -->", "<!-- end -->"


def commands() -> str:
    """Every command with its arguments, options and examples."""
    return "\n".join(_command("zerotune", command_line(), "##")).strip()


def _command(name: str, command: Any, heading: str) -> Iterator[str]:
    if heading != "##":
        yield f"{heading} `{name}`\n"
        # Examples stand in a command's help as "Words: zerotune ...".
        text = command.help or ""
        yield re.sub(r"^([^\n`]*?): (zerotune .*)$", r"\1:\n\n```\n\2\n```", text, flags=re.MULTILINE)
        yield ""
        if rows := [_row(one) for one in command.params if "--help" not in one.opts]:
            yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows, ""])
    for below, one in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {below}", one, f"{heading}#")


def _row(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts] if option.param_type_name == "option" else [option.name.upper()]
    if ":" in (option.metavar or ""):
        names = [f"{name} {option.metavar}" for name in names]
    about = [option.help or ""]
    if "|" in (option.metavar or ""):
        about.append(f"One of {option.metavar.replace('|', ', ')}.")
    if option.required:
        about.append("Required.")
    elif isinstance(option.default, (int, float, str, Path, list, tuple)) and not isinstance(option.default, bool):
        several = option.default if isinstance(option.default, (list, tuple)) else [option.default]
        about.append(f"Default: {', '.join(map(str, several))}." if several else "")
    if option.envvar:
        about.append(f"Environment: `{option.envvar}`.")
    meaning = " ".join(filter(None, about)).replace("|", "\\|")
    return f"| {', '.join(f'`{one}`' for one in names)} | {meaning} |"


def metrics() -> str:
    """Every metric, as the collector describes it."""
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *_metric_rows()])


def _metric_rows() -> Iterator[str]:
    for metric in _example():
        labels = {name: None for sample in metric.samples for name in sample.labels if name != "le"}
        name = metric.name + ("_total" if metric.type == "counter" else "")
        yield f"| `{name}` | {metric.type} | {', '.join(labels)} | {metric.documentation} |"


def _example() -> list[Metric]:
    """What a collector tells of one job and one measured collective, which is every metric."""
    late = LateRank(1, 1.0, 1.0, 0, 9, "node")
    lateness = Lateness(100, 1.0, 1.0, (late,), (SlowCommunicator((0, 1), 1.0, 1.0, 0, 9),))
    counts = (4, 4, 1, 100, 1000, 0, 10)
    status = JobStatus("job", "fabric", Stage.zero3, *counts, 1000.0, 100_000.0, 0.1, lateness=lateness)
    reply = StatusReply(1, "0", "", "", 1.0, 1, 0, (status,))
    block = np.zeros(1, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["message_bytes"], block["duration_us"] = 4, 1, 1 << 20, 100.0
    with TemporaryDirectory() as folder, patch("zerotune.tuner.metrics.collector.fetch_status", return_value=reply):
        with Store.open(Path(folder) / "store.db") as store:
            store.record_job("job", "fabric", {}, 4)
            store.record_measurements("fabric", "job", block)
            store.flush()
        return list(Collector("", Path(folder) / "store.db", from_start=True).collect())


TABLES: Final[dict[str, Callable[[], str]]] = {"commands.md": commands, "metrics.md": metrics}
"""What is made, by page."""


def page(name: str) -> str:
    """A page as it should be."""
    before, _, rest = (FOLDER / name).read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{TABLES[name]()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for made in TABLES:
        (FOLDER / made).write_text(page(made))
