"""The settings in force by message size, as a table that pages and terminals draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...store.counted import faster
from ...store.records import Decision, DecisionKey, size_class_floor
from .comparison import Comparison
from .size_ranges import rounded_range


class Winner(NamedTuple):
    """A setting in force."""

    setting: str
    change_percent: float | None
    """Change of time against NCCL's own choice: negative is faster; None if it is unknown."""
    is_measured: bool
    """Whether the change is measured, and not predicted."""
    us: float | None = None
    """A collective's time under the setting, and `own_us` under NCCL's own choice; None if unknown."""
    own_us: float | None = None

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key; the lowest of a cell is drawn. Measured settings come first, then those that save most."""
        return not self.is_measured, 0.0 if self.change_percent is None else self.change_percent

    def words(self, *, is_narrow: bool) -> str:
        """Text in the picture's cell."""
        lines = self.setting.replace("/", "\n", -1 if is_narrow else 1)
        if self.change_percent is None or abs(self.change_percent) < 0.5:
            return lines
        return f"{lines}\n{faster(self.change_percent)}" + ("" if self.is_measured else "\npredicted")

    def details(self, row: str, column: str) -> str:
        """All facts of the cell, in lines."""
        known = [("takes", self.us), ("NCCL's own choice", self.own_us)]
        how = "measured" if self.is_measured else "predicted"
        return "\n".join([
            row.replace("\n", ", "),
            column.replace("\n", " "),
            self.setting,
            *([] if self.change_percent is None else [f"{faster(self.change_percent, 1)}, {how}"]),
            *(f"{what}: {us:,.1f} us" for what, us in known if us is not None),
        ])  # fmt: skip


class WinnerTable(NamedTuple):
    """Winners by collective and phase, and by octave of message size."""

    rows: Sequence[str]
    """Labels: collective, phase, separated by a line feed."""
    columns: Sequence[str]
    """Labels: ranges of sizes, in two lines."""
    cells: Sequence[Sequence[Winner | None]]
    """[row][column]; None if nothing was decided."""


def winner_table(
    in_force: Mapping[DecisionKey, Decision], against_own: Callable[[Decision], Comparison]
) -> WinnerTable:
    """Settings in force as a table; if keys share a cell, it has the measured winner that changed most."""
    rows = sorted({(key.collective, key.phase, key.communicator) for key in in_force})
    octaves = sorted({_octave(key) for key in in_force})
    cells: list[list[Winner | None]] = [[None] * len(octaves) for _ in rows]
    for key, decision in sorted(in_force.items()):
        row, column = rows.index((key.collective, key.phase, key.communicator)), octaves.index(_octave(key))
        comparison = against_own(decision)
        change = 0.0 if decision.candidate.is_baseline else comparison.change_percent
        setting = str(decision.candidate).replace("baseline", "NCCL's own")
        winner = Winner(setting, change, comparison.is_measured, comparison.us, comparison.own_us)
        known = cells[row][column]
        if known is None or winner.rank < known.rank:
            cells[row][column] = winner
    labels = [f"{collective.name}\n{phase.name}" for collective, phase, _ in rows]
    sizes = [rounded_range(1 << octave, (2 << octave) - 1, " to\n") for octave in octaves]
    return WinnerTable(labels, sizes, cells)


def _octave(key: DecisionKey) -> int:
    return size_class_floor(key.size_class).bit_length() - 1
