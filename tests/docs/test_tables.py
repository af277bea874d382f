"""Tables of the documentation name what the code has: whoever adds one is told here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import reference_tables
from zerotune.agent.nccl import fabric
from zerotune.agent.nccl.release import Release
from zerotune.tuner.traces.formats import FORMATS

DOCS = Path(__file__).parents[2] / "docs"


def test_trace_formats():
    assert _first_names("reference/formats.md", "format") == {one.name for one in FORMATS}


def test_fabrics():
    assert _first_names("reference/formats.md", "fabric") == set(fabric.names())


def test_nccl_releases():
    """The interfaces that each release looks for."""
    rows = _rows("design/nccl.md", "NCCL")
    assert len(rows) >= 5
    for releases, tuner, profiler, _ in rows:
        for text in re.findall(r"\d+\.\d+", releases):
            major, minor = map(int, text.split("."))
            known = Release((major, minor))
            assert (_version(tuner), _version(profiler)) == (known.tuner_abi, known.profiler_abi), releases


@pytest.mark.parametrize("name", reference_tables.TABLES)
def test_reference_pages(name: str):
    assert (DOCS / "reference" / name).read_text() == reference_tables.page(name), "python -m docs.reference_tables"


def _version(text: str) -> int:
    return int(text.removeprefix("v")) if text.startswith("v") else 0


def _first_names(page: str, heading: str) -> set[str]:
    return {name for row in _rows(page, heading) for name in re.findall(r"`(\w+)`", row[0])}


def _rows(page: str, heading: str) -> list[list[str]]:
    """The rows of the table whose first column is called that."""
    lines = iter((DOCS / page).read_text().splitlines())
    for line in lines:
        if line.startswith(f"| {heading} |"):
            next(lines)
            return [[cell.strip() for cell in row.strip("|").split("|")] for row in _while_table(lines)]
    raise AssertionError(f"{page} has no table with {heading}")


def _while_table(lines):
    for line in lines:
        if not line.startswith("|"):
            return
        yield line
