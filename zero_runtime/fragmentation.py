"""What memory looks like after a checkpointed forward, with and without contiguous buffers: a first-fit heap.

A model of an allocator, to show why M_D exists and to draw it; nothing of it runs in training.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FREE, SHORT, LONG = ".", "s", "#"
CHECKPOINT_CELLS = 3


@dataclass
class Heap:
    """Cells of memory given out first-fit."""

    n_cells: int
    cells: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [FREE] * self.n_cells

    def take(self, n: int, kind: str) -> int | None:
        """Start of the first free stretch of `n` cells, now taken; None when there is none."""
        start = "".join(self.cells).find(FREE * n)
        if start < 0:
            return None
        self.cells[start : start + n] = [kind] * n
        return start

    def give(self, start: int, n: int) -> None:
        """Frees cells."""
        self.cells[start : start + n] = [FREE] * n

    @property
    def n_free(self) -> int:
        """Free cells, wherever they are."""
        return self.cells.count(FREE)

    @property
    def largest_free(self) -> int:
        """Longest free stretch: the largest tensor that can still be had."""
        return max(len(run) for run in "".join(self.cells).replace(SHORT, " ").replace(LONG, " ").split(" "))


def checkpointed_forward(n_layers: int, contiguous: bool, n_cells: int = 96) -> Heap:
    """The heap behind the forward: per layer, activations live until the next layer's exist; a checkpoint stays."""
    heap = Heap(n_cells)
    if contiguous:
        heap.take(n_layers * CHECKPOINT_CELLS, LONG)
    alive: tuple[int, int] | None = None
    for layer in range(n_layers):
        n = 4 + layer * 5 % 7  # no two neighbours are alike
        start = heap.take(n, SHORT)
        if not contiguous:
            heap.take(CHECKPOINT_CELLS, LONG)
        if alive is not None:
            heap.give(*alive)
        assert start is not None
        alive = (start, n)
    if alive is not None:
        heap.give(*alive)
    return heap


def picture(n_layers: int = 12) -> str:
    """Two rows of memory: `#` checkpoints, `.` free."""
    lines = []
    for name, contiguous in (("without M_D", False), ("with M_D", True)):
        heap = checkpointed_forward(n_layers, contiguous)
        lines.append(f"{name:<12}{''.join(heap.cells)}  {heap.n_free} free, longest {heap.largest_free}")
    return "\n".join(lines)
