"""Random models, and random packings of their pieces into calls, for the grammar's frameworks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from zerotune.tuner.fingerprint.steps.anatomy import Ints

Rng = np.random.Generator
GeneratedCall = tuple[int, int]
"""(unit, bytes): the unit that must be done before the call, or that needs it."""
Pieces = list[list[int]]
"""Elements of every tensor, by unit."""

MAX_CALLS_PER_PASS: Final = 96


def draw_pieces(rng: Rng) -> Pieces:
    """A model: units that are equal, alternate, grow or all differ, between a first and a last one of other size."""
    n_units = int(np.exp(rng.uniform(0.0, np.log(40))))
    n_kinds = int(rng.choice([1, 1, 1, 2, 3, n_units]))
    kinds = [_unit(rng) for _ in range(max(1, n_kinds))]
    if n_kinds == n_units and rng.random() < 0.5:  # the same, wider and wider
        kinds = [[int(n * 1.3**i) for n in kinds[0]] for i in range(max(1, n_kinds))]
    halves = n_kinds == 2 and rng.random() < 0.5  # an encoder, then a decoder
    units = [list(kinds[(2 * i // n_units) if halves else i % len(kinds)]) for i in range(n_units)]
    typical = sum(units[0])
    ends = [[max(1, int(typical * np.exp(rng.normal(0.0, 2.2))))] for _ in range(2)]
    if rng.random() < 0.6:
        ends[1] += [int(rng.integers(1, 5000)) for _ in range(int(rng.integers(1, 3)))]
    if rng.random() < 0.75:
        units.insert(0, ends[0])
    if rng.random() < 0.5:
        units.append(ends[1])
    return units


def _unit(rng: Rng) -> list[int]:
    width = int(np.exp(rng.uniform(np.log(32), np.log(6000))))
    matrices = [
        int(rng.choice([0.25, 0.5, 1, 1, 1, 2, 3, 4, 4]) * width * width) for _ in range(int(rng.integers(1, 7)))
    ]
    vectors = [int(rng.choice([1, 1, 3, 4])) * width for _ in range(int(rng.choice([0, 0, 1, 2, 3, 6, 8])))]
    pieces = [*matrices, *vectors]
    return [max(1, pieces[i]) for i in rng.permutation(len(pieces))]


@dataclass(frozen=True)
class Packing:
    by: str
    n_calls: float
    """The aimed number of calls, if the packing leaves it open."""

    @classmethod
    def draw(cls, rng: Rng) -> Packing:
        """By piece, by unit, in buckets that fill up, capped or equal, or all in one."""
        by = str(rng.choice(["piece", "unit", "unit", "full", "full", "capped", "even", "even", "one", "one"]))
        return cls(by, float(np.exp(rng.uniform(np.log(0.7), np.log(MAX_CALLS_PER_PASS)))))


def packed(
    pieces: Pieces,
    n_bytes: int,
    align: int,
    rng: Rng,
    how: Packing | None = None,
    *,
    starts: bool = False,
    even: bool = True,
) -> tuple[GeneratedCall, ...]:
    """Pack the tensors of a model into calls, in order.

    Args:
        pieces: elements of every tensor, by unit.
        n_bytes: of one element.
        align: calls are padded to a multiple of it, in bytes.
        how: None: drawn.
        starts: a call counts with the unit of its first element; else with the unit of its last one.
        even: whether buckets may be of equal size.

    Returns:
        (position of the unit, bytes) of each call.
    """
    units = np.array([sum(unit) for unit in pieces], np.int64)
    ends = np.cumsum([n for unit in pieces for n in unit], dtype=np.int64)
    total = int(units.sum())
    how = how or Packing.draw(rng)
    cap, by = max(total // MAX_CALLS_PER_PASS, int(total / how.n_calls), 1), how.by
    if by == "even" and not even:
        by = "full"
    if by in ("piece", "unit") and len(ends) > MAX_CALLS_PER_PASS:
        by = "unit" if len(pieces) <= MAX_CALLS_PER_PASS else "full"
    bounds = _bounds(by, ends, np.cumsum(units), cap, rng)
    begins = np.concatenate([[0], bounds[:-1]])
    at = np.searchsorted(np.cumsum(units), begins if starts else bounds - 1, side="right")
    calls = [
        (int(unit), rounded(n_elements * n_bytes, align))
        for unit, n_elements in zip(at.tolist(), (bounds - begins).tolist(), strict=True)
        if n_elements > 0
    ]
    if rng.random() < 0.12:  # buckets leave a little out of order
        order = np.argsort(np.arange(len(calls)) + rng.uniform(0, 2.5, len(calls)), kind="stable")
        calls = [(max(calls[i][0], calls[j][0]), calls[j][1]) for i, j in enumerate(order.tolist())]
    return tuple(calls)


def _bounds(how: str, ends: Ints, units: Ints, cap: int, rng: Rng) -> npt.NDArray[np.int64]:
    """The ends of calls, in elements."""
    total = int(ends[-1])
    if how == "piece":
        return ends
    if how == "unit":
        return units
    if how == "one":
        return ends[-1:]
    if how == "even":
        n = -(-total // cap)
        return np.unique(-(-total // n) * np.arange(1, n + 1).clip(max=n)).clip(max=total)
    if how == "capped":
        return np.unique(np.append(np.arange(cap, total, cap), total))
    found, begin = [], 0
    limit = cap // int(rng.choice([1, 1, 4, 25])) or 1  # the first bucket may be smaller, so that it leaves early
    overfull = rng.random() < 0.6  # closed by the piece that fills it, or before the piece that would
    for last, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
        if not overfull and end - begin > limit and last > begin:
            found.append(last)
            begin, limit = last, cap
        elif overfull and end - begin >= limit:
            found.append(end)
            begin, limit = end, cap
    if not found or found[-1] != total:
        found.append(total)
    return np.array(found, np.int64)


def rounded(n_bytes: float, align: int) -> int:
    """Padded up to a multiple of `align`; 1 at least."""
    return max(1, -(-int(n_bytes) // align) * align)
