"""What changes of the environment did to calls, by a book that has the same hardware with and without them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import permutations
from typing import Final

import numpy as np

from ..call_effects import CallEffect
from ..same_machine import Facts, hardware_of, variables_of
from .book import Book, Cell, FabricLine

LEAST_CELLS: Final = 3
"""Fewer kinds of calls say nothing of an environment."""

_Place = tuple[int, int, int, str, str, int]


def call_effects(book: Book) -> list[CallEffect]:
    """The effect of each change that a fabric of the book differs by from another one of the same hardware."""
    cells: dict[str, dict[_Place, Cell]] = defaultdict(dict)
    for one in book.cells:
        if one.is_default:
            cells[one.fabric_id][_place(one)] = one
    machines: dict[tuple[tuple[str, object], ...], list[FabricLine]] = defaultdict(list)
    for fabric in book.fabrics:
        if hardware := hardware_of(fabric.facts):
            machines[tuple(sorted(hardware.items()))].append(fabric)
    return [
        effect
        for fabrics in machines.values()
        for usual, changed in permutations(fabrics, 2)
        for change in _only_change(usual.facts, changed.facts)
        for effect in _effect(hardware_of(usual.facts), change, cells[usual.fabric_id], cells[changed.fabric_id])
    ]


def _only_change(usual: Facts, changed: Facts) -> Iterator[str]:
    before, after = variables_of(usual), variables_of(changed)
    news = after.items() - before.items()
    if len(news) == 1 and before.items() <= after.items():
        ((name, value),) = news
        yield f"{name}={value}"


def _effect(
    hardware: Facts, change: str, usual: dict[_Place, Cell], changed: dict[_Place, Cell]
) -> Iterator[CallEffect]:
    pairs = [(usual[place], changed[place]) for place in usual.keys() & changed.keys()]
    if len(pairs) < LEAST_CELLS:
        return
    logs = np.log([there.median_us / here.median_us for here, there in pairs])
    weights = np.array([here.n_calls * here.median_us for here, _ in pairs])
    longer = float(np.average(logs, weights=weights))
    std = math.sqrt(float(np.average((logs - longer) ** 2, weights=weights)))
    n_contributors = min(min(here.n_contributors, there.n_contributors) for here, there in pairs)
    yield CallEffect(dict(hardware), change, longer, std, n_contributors)


def _place(one: Cell) -> _Place:
    return one.nccl_version, one.n_ranks, one.n_nodes, one.collective, one.phase, one.size_class
