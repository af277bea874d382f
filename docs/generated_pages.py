"""Hooks of mkdocs: parts of pages that are generated from the code, and pages that lie outside this folder.

A line `<!-- generated: NAME -->` in a page becomes what `GENERATED[NAME]` returns, so that it cannot go stale.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from prometheus_client.core import Metric

from zerotune.store.records import Stage
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.store.wire import JobStatus, StatusReply
from zerotune.tuner.metrics.collector import Collector

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages by the file at the top of the repository that they show."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages out of the navigation that are not written yet."""
    config.nav = _written(config.nav)
    return config


def _written(entry: Any) -> Any:
    if isinstance(entry, list):
        return [kept for kept in map(_written, entry) if kept]
    if isinstance(entry, dict):
        return {title: kept for title, kept in ((title, _written(below)) for title, below in entry.items()) if kept}
    return entry if (ROOT / "docs" / entry).is_file() or (ROOT / ELSEWHERE.get(entry, "-")).is_file() else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside this folder, where they are there."""
    for page, source in ELSEWHERE.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, page, content=_as_page((ROOT / source).read_text())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put what is generated in its place."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda found: GENERATED[found[1]](), markdown)


def commands() -> str:
    """Every command with its arguments, options and examples, as typer's own documentation command prints them."""
    command = [sys.executable, "-m", "typer", "zerotune.tuner.cli.app", "utils", "docs", "--name", "zerotune"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    _, *sections = re.split(r"^(?=##+ `)", html.unescape(printed), flags=re.MULTILINE)
    text = "".join(section for section in sections)
    text = re.sub(r"^\* `--help`: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*Options\*\*:\n\n(?=\n|\Z|#)", "", text)
    return re.sub(r"^([^\n`#*|]*?): (zerotune .*)$", r"\1:\n\n```\n\2\n```", text, flags=re.MULTILINE)


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
    status = JobStatus("job", "fabric", Stage.zero3, 4, 4, 1, 100, 1000, 0, 10, 1000.0, 100_000.0, 0.1)
    reply = StatusReply(1, "0", "", "", 1.0, 1, 0, (status,))
    block = np.zeros(1, MEASUREMENT)
    block["n_ranks"], block["n_nodes"], block["message_bytes"], block["duration_us"] = 4, 1, 1 << 20, 100.0
    with TemporaryDirectory() as folder, patch("zerotune.tuner.metrics.collector.fetch_status", return_value=reply):
        with Store.open(Path(folder) / "store.db") as store:
            store.record_job("job", "fabric", {}, 4)
            store.record_measurements("fabric", "job", block)
            store.flush()
        return list(Collector("", Path(folder) / "store.db", from_start=True).collect())


def _as_page(text: str) -> str:
    """Links into docs/ become links of the site; those to other files of the repository become their names."""
    text = re.sub(r"\]\(docs/", "](", text)
    return re.sub(r"\[([^]]+)\]\((?!https?:)(?!#)([^)]+)\)", _only_pages, text)


def _only_pages(found: re.Match[str]) -> str:
    target = ELSEWHERE_BY_SOURCE.get(found[2], found[2])
    inside = (ROOT / "docs" / target.split("#")[0]).exists() or target in ELSEWHERE
    return f"[{found[1]}]({target})" if inside else found[1]


ELSEWHERE_BY_SOURCE = {source: page for page, source in ELSEWHERE.items()}
GENERATED: dict[str, Callable[[], str]] = {"commands": commands, "metrics": metrics}
