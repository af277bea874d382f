"""Compares NCCL's live cost tables with the cost model, and finds the cells that the model must state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from ....store.records import Algorithm, Collective, Protocol
from .. import cost_model
from ..cell_terms import StatedCell, Topology
from .protocol import Answer

MODELLED_SINCE: Final = (2, 23)
"""2.22 has older tables, and 2.21 shows its tuner none."""
NVLS: Final = (Algorithm.nvls, Algorithm.nvls_tree)
"""Algorithms that the model does not compute: they are read from a live table, or stated by a fabric file."""
WORST_RELATIVE_ERROR: Final = 1e-3
"""A cell with a larger error is stated instead of computed."""
_NO_TIME_GBS: Final = 1e9
_Cell = tuple[Collective, Algorithm, Protocol]


class Difference(NamedTuple):
    """One cell at one size; a cost is None if the table does not have the cell."""

    collective: Collective
    message_bytes: int
    algorithm: Algorithm
    protocol: Protocol
    nccl_us: float | None
    model_us: float | None

    @property
    def relative_error(self) -> float:
        """Infinite if only one of the two has the cell."""
        if self.nccl_us is None or self.model_us is None:
            return float("inf")
        return abs(self.model_us / self.nccl_us - 1)


def differences(answers: Sequence[Answer], model: Topology) -> Iterator[Difference]:
    """Every cell that NCCL or the model has, for each answer."""
    for answer in answers:
        question = answer.question
        table = cost_model.cost_table(model, question.collective, question.message_bytes)
        nccl = {(cell.algorithm, cell.protocol): cell.cost_us for cell in answer.cells}
        for algorithm in Algorithm:
            for protocol in Protocol:
                nccl_us, cost_us = nccl.get((algorithm, protocol)), float(table[algorithm, protocol])
                model_us = cost_us if cost_us >= 0 else None
                if not nccl_us is model_us is None:
                    where = question.collective, question.message_bytes, algorithm, protocol
                    yield Difference(*where, nccl_us, model_us)


def with_stated_cells(answers: Sequence[Answer], model: Topology) -> Topology:
    """The model, with stated cells for those that it does not compute, or not as this NCCL does.

    Args:
        answers: for each collective at several sizes; the terms of a cell follow from the smallest and the largest. At
            other sizes the model may still differ.
        model: without stated cells.
    """
    live: dict[_Cell, dict[int, float | None]] = {}
    wrong: set[_Cell] = set()
    for each in differences(answers, model):
        cell = each.collective, each.algorithm, each.protocol
        live.setdefault(cell, {})[each.message_bytes] = each.nccl_us
        if each.relative_error > WORST_RELATIVE_ERROR:
            wrong.add(cell)
    return msgspec.structs.replace(
        model, stated_cells=tuple(_stated(model, cell, live[cell]) for cell in live if cell in wrong)
    )


def _stated(model: Topology, cell: _Cell, costs: Mapping[int, float | None]) -> StatedCell:
    """The terms with which the model gives these costs to the smallest and the largest message."""
    collective, algorithm, protocol = cell

    def at(latency_us: float, gbs: float) -> StatedCell:
        return msgspec.convert(
            dict(zip(StatedCell.__struct_fields__, (*(each.name for each in cell), latency_us, gbs), strict=True)),
            StatedCell,
        )

    def cost_us(terms: StatedCell) -> list[float]:
        stating = msgspec.structs.replace(model, stated_cells=(terms,))
        return [float(each) for each in cost_model.cost_us(stating, collective, algorithm, protocol, sizes)]

    sizes = [min(costs), max(costs)]
    small_us, large_us = costs[sizes[0]], costs[sizes[1]]
    if small_us is None or large_us is None:
        return at(0.0, 0.0)
    # A cost is linear in latency and in time per byte; the model gives the coefficients at each size.
    (small_latency, large_latency), (small_bytes, large_bytes) = cost_us(at(1.0, _NO_TIME_GBS)), cost_us(at(0.0, 1.0))
    determinant = small_latency * large_bytes - large_latency * small_bytes
    latency_us = (small_us * large_bytes - large_us * small_bytes) / determinant
    us_per_unit = (small_latency * large_us - large_latency * small_us) / determinant
    return at(max(0.0, latency_us), 1 / us_per_unit if us_per_unit > 0 else _NO_TIME_GBS)
