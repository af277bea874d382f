"""Effects of changed environments on calls, by a book that has the same hardware with and without them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import numpy as np

from ..call_effects import MOST_LOG, CallEffect
from ..same_machine import Facts, hardware_of, variables_of
from .book import Book, Cell

SPREAD: Final = 0.2
"""Prior standard deviation (log) of a change's effect between kinds of calls; it counts as one kind. Assumed: no
recording tells."""

_Place = tuple[int, int, int, str, str, int]


def call_effects(book: Book) -> list[CallEffect]:
    """The effect of each change that a fabric of the book has and another one of the same hardware has not."""
    cells: dict[str, dict[_Place, Cell]] = defaultdict(dict)
    for one in book.cells:
        if one.is_default and one.n_calls and one.n_contributors:
            cells[one.fabric_id][_place(one)] = one
    fabrics = [one for one in book.fabrics if hardware_of(one.facts)]
    by_facts = {_set_of(one.facts): one.fabric_id for one in fabrics}
    return [
        effect
        for fabric in fabrics
        for name, value in variables_of(fabric.facts).items()
        if (usual := by_facts.get(_set_of(fabric.facts, without=name))) is not None
        for effect in _effect(hardware_of(fabric.facts), f"{name}={value}", cells[usual], cells[fabric.fabric_id])
    ]


def _set_of(facts: Facts, without: str = "") -> frozenset[tuple[str, object]]:
    known = hardware_of(facts) | variables_of(facts)
    return frozenset((name, value) for name, value in known.items() if name != without)


def _effect(
    hardware: dict[str, str | int | float | bool], change: str, usual: dict[_Place, Cell], changed: dict[_Place, Cell]
) -> Iterator[CallEffect]:
    pairs = [(usual[place], changed[place]) for place in usual.keys() & changed.keys()]
    if not pairs:
        return
    logs = np.log([there.median_us / here.median_us for here, there in pairs])
    weights = np.array([here.n_calls * here.median_us for here, _ in pairs])
    longer = float(np.average(logs, weights=weights))
    variance = float(np.average((logs - longer) ** 2, weights=weights))
    std = math.sqrt((len(pairs) * variance + SPREAD**2) / (len(pairs) + 1))
    n_contributors = min(min(here.n_contributors, there.n_contributors) for here, there in pairs)
    yield CallEffect(hardware, change, max(-MOST_LOG, min(MOST_LOG, longer)), min(MOST_LOG, std), n_contributors)


def _place(one: Cell) -> _Place:
    return one.nccl_version, one.n_ranks, one.n_nodes, one.collective, one.phase, one.size_class
