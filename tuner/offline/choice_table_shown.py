"""Prints `zerotune predict`: rows are sizes, columns are node counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table

from ...store.counted import faster, size_text
from ...store.records import CommunicatorClass
from .choice_table import ChoiceTable, Ground, TableEntry
from .emulated_note import emulated_note


def render(found: ChoiceTable, console: Console) -> None:
    """One table per collective and phase; neighbouring sizes with the same settings share a line."""
    for (collective, phase), entries in groupby(found.entries, lambda one: (one.collective, one.phase)):
        of_place = [list(part) for _, part in groupby(entries, lambda one: one.n_nodes)]
        title = collective if phase == "other" else f"{collective}, {phase}"
        columns = [str(CommunicatorClass(part[0].n_ranks, part[0].n_nodes)) for part in of_place]
        table = Table("size", *columns, title=title)
        for sizes, cells in _lines(of_place):
            table.add_row(sizes, *cells)
        console.print(table)
    if found.emulated:
        console.print(emulated_note(found.emulated))
    for note in found.notes:
        console.print(note, markup=False)


def _lines(of_place: Sequence[Sequence[TableEntry]]) -> Iterator[tuple[str, list[str]]]:
    rows = list(zip(*of_place, strict=True))
    for cells, part in groupby(rows, lambda row: [_cell(entry) for entry in row]):
        sizes = [row[0].message_bytes for row in part]
        low, high = size_text(sizes[0]), size_text(sizes[-1])
        yield (low if low == high else f"{low} to {high}"), cells


def _cell(entry: TableEntry) -> str:
    if entry.ground is Ground.nccl:
        return f"{entry.setting} (NCCL)"
    return f"{entry.setting} ({entry.ground.value}){_change(entry)}"


def _change(entry: TableEntry) -> str:
    if not entry.expected_us or not entry.nccl_us:
        return ""
    return f" {faster(100 * (entry.expected_us / entry.nccl_us - 1))}"
