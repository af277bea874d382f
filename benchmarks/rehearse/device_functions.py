"""The collective, algorithm and protocol of each device function of NCCL.

NCCL numbers its device functions by a table from row to number (`ncclDevFuncRowToId`); rows count up through
collectives, reductions, types, algorithms and protocols (ncclDevFuncId in src/include/device.h, 2.22 to 2.30).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from zerotune.agent.nccl.mock_cuda.symbols import variables
from zerotune.store.errors import PluginError
from zerotune.store.records import Algorithm, Collective, Protocol

_TABLE: Final = "ncclDevFuncRowToId"
_N_REDUCTIONS: Final = 5
"""Sum, product, minimum or maximum, premultiplied sum, sum with a division afterwards."""
_BY_ALGORITHM: Final = (Algorithm.ring, Algorithm.collnet_direct, Algorithm.nvls, Algorithm.pat)
_ALL_REDUCE: Final = tuple(each for each in Algorithm if each is not Algorithm.pat)


class DeviceFunction(NamedTuple):
    """The meaning of a device function."""

    collective: Collective
    algorithm: Algorithm
    protocol: Protocol


def device_functions(path: Path, base: int) -> dict[int, DeviceFunction]:
    """Read the table of a loaded libnccl.

    Args:
        base: the library's address.

    Returns:
        Functions by number, without send and receive.

    Raises:
        PluginError: the library has no table, or no known order of rows fits it.
    """
    table = next((each for each in variables(path) if each.name == _TABLE), None)
    if table is None:
        raise PluginError(f"{path} has no {_TABLE}: the device functions of this release are not known")
    n_rows = table.n_bytes // ctypes.sizeof(ctypes.c_int)
    numbers = list((ctypes.c_int * n_rows).from_address(base + table.address))
    for rows in _orders():
        if len(rows) == n_rows and (found := _explained(rows, numbers)) is not None:
            return found
    raise PluginError(f"the {n_rows} device functions of {path} are in an order that is not known")


def _orders() -> Iterator[list[DeviceFunction | None]]:
    for n_types in (12, 10):  # with and without 8-bit floating point
        for algorithms in (_BY_ALGORITHM, _BY_ALGORITHM[:3]):  # PAT is new in 2.23
            for n_variable_gathers in (0, 1):  # AllGatherV is new in 2.29
                yield _rows(n_types, algorithms, n_variable_gathers)


def _rows(n_types: int, algorithms: Sequence[Algorithm], n_variable_gathers: int) -> list[DeviceFunction | None]:
    def cells(collective: Collective, offered: Sequence[Algorithm]) -> list[DeviceFunction | None]:
        return [DeviceFunction(collective, algorithm, protocol) for algorithm in offered for protocol in Protocol]

    n_reductions = _N_REDUCTIONS * n_types
    return [
        None,
        *cells(Collective.all_gather, algorithms),
        *cells(Collective.broadcast, [Algorithm.ring]),
        *([None] * (len(Protocol) * n_variable_gathers)),
        *(cells(Collective.all_reduce, _ALL_REDUCE) * n_reductions),
        *(cells(Collective.reduce, [Algorithm.ring]) * n_reductions),
        *(cells(Collective.reduce_scatter, algorithms) * n_reductions),
        None,  # the last row has no meaning
    ]


def _explained(rows: list[DeviceFunction | None], numbers: Sequence[int]) -> dict[int, DeviceFunction] | None:
    """Functions by number; None if a number would have two meanings: the rows are in another order."""
    found: dict[int, DeviceFunction | None] = {}
    for row, number in zip(rows, numbers, strict=True):
        if number >= 0 and found.setdefault(number, row) != row:
            return None
    return {number: function for number, function in found.items() if function is not None}
