"""Ranges of a flattened tensor as boxes of the tensor, which checkpoints of any sharding have in common."""

from __future__ import annotations

from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, one number per dimension


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """A range of the row-major flattened tensor, as at most 2·dims − 1 boxes in the order of the elements.

    These are a partial first row, whole rows, and a partial last row; partial rows are split in the same way. An empty
    range has no boxes.
    """
    if start >= end:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    if len(shape) == 1:
        return [((start,), (end - start,))]
    first, last = start // row, (end - 1) // row

    def inside(index: int, low: int, high: int) -> list[Box]:
        return [((index, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], low, high)]

    if first == last and (start, end) != (first * row, (first + 1) * row):
        return inside(first, start - first * row, end - first * row)
    found: list[Box] = []
    whole = first
    if start % row:
        found += inside(first, start % row, row)
        whole += 1
    n_whole = end // row - whole
    if n_whole:
        found.append(((whole, *(0 for _ in shape[1:])), (n_whole, *shape[1:])))
    if end % row:
        found += inside(last, 0, end % row)
    return found
