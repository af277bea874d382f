"""Rows for spans that may overlap: as few as it takes, with none above another."""

from __future__ import annotations

import heapq


class SideBySide:
    """Places spans in the order of their beginnings."""

    def __init__(self) -> None:
        self.n_rows = 0
        self._ends: list[tuple[float, int]] = []
        """Heap of (end of its last span, row)."""

    def row_of(self, begin: float, end: float) -> int:
        """The row of a span that begins not before the last one; rows count from 0."""
        if self._ends and self._ends[0][0] <= begin:
            _, row = heapq.heappop(self._ends)
        else:
            row, self.n_rows = self.n_rows, self.n_rows + 1
        heapq.heappush(self._ends, (end, row))
        return row
