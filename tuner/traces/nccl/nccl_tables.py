"""The latency/bandwidth tables that NCCL prints when a communicator is created (NCCL_DEBUG_SUBSYS=TUNING)."""

from __future__ import annotations

import re
from typing import Final

from zerotune.agent.nccl.catalog import find_collective, parse_algorithm
from zerotune.store.errors import UserError
from zerotune.store.records import Algorithm, Protocol

_LINE: Final = re.compile(rb"NCCL INFO +(\w+(?: NThreads)?) +\|([^\n]+)\|")
_CELL: Final = re.compile(rb"^ *(-?[\d.]+)/ *(-?[\d.]+) *$")

Cells = dict[str, tuple[float, float]]


class TableReader:
    """Collects `cells`: "all_gather ring simple" -> (latency_us, algorithm bandwidth in GB/s); the last table wins."""

    def __init__(self) -> None:
        self.cells: Cells = {}
        self._algorithms: list[Algorithm] = []

    def read(self, chunk: bytes) -> None:
        """Read the table lines of a piece of a log; a table may go on in the next piece."""
        for label, cells in _LINE.findall(chunk):
            if label == b"Algorithm":
                self._algorithms = []
                for name in cells.split(b"|"):
                    try:
                        self._algorithms.append(parse_algorithm(name.decode("utf-8", "replace")))
                    except UserError:
                        self._algorithms = []
                        break
            elif label not in (b"Protocol", b"Max NThreads"):
                self._row(label, cells)

    def _row(self, label: bytes, cells: bytes) -> None:
        collective = find_collective(label.decode("utf-8", "replace"))
        if collective is None:
            return
        for position, text in enumerate(cells.split(b"|")):
            found = _CELL.match(text)
            algorithm_index, protocol_index = divmod(position, len(Protocol))
            if found is None or algorithm_index >= len(self._algorithms):
                continue
            try:
                values = float(found[1]), float(found[2])
            except ValueError:
                continue
            if values[1] > 0:
                algorithm = self._algorithms[algorithm_index]
                self.cells[f"{collective.name} {algorithm.name} {Protocol(protocol_index).name}"] = values
