"""Published grids (settings x sizes): all tables below a folder, in the form of benchmarks/recordings/grids.tsv."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Protocol
from zerotune.store.sqlite.rows.runnable import can_run

Setting = tuple[str, str]
"""(algorithm, protocol) in lower case; empty = NCCL's own choice."""
COLUMNS: Final = ["grid", "collective", "n_ranks", "n_nodes", "message_bytes", "algorithm", "protocol", "duration_us"]
"""Of a table of grids; algorithm and protocol are empty if NCCL chose."""
MIN_PLACES: Final = 3


@dataclass
class Grid:
    """One machine's grid of one collective."""

    name: str
    collective: Collective
    n_ranks: int
    n_nodes: int
    times_us: dict[int, dict[Setting, list[float]]] = field(default_factory=dict)

    def places(self) -> dict[int, dict[Candidate, list[float]]]:
        """All recorded microseconds by size and setting, if at least two settings were measured.

        Settings that NCCL cannot run are left out, even if a heading has them.
        """
        found = {
            size: {candidate: times for one, times in known.items() if self._can_run(candidate := candidate_of(one))}
            for size, known in sorted(self.times_us.items())
        }
        return {size: known for size, known in found.items() if len(known) > 1}

    def _can_run(self, candidate: Candidate) -> bool:
        return can_run(self.collective, candidate.algorithm, candidate.protocol, self.n_nodes)


def candidate_of(setting: Setting) -> Candidate:
    """A protocol without algorithm is the ring's."""
    algorithm, protocol = setting
    if setting == ("", ""):
        return BASELINE
    return Candidate(Algorithm[algorithm or "ring"], Protocol[protocol or "simple"])


def load(folder: Path) -> list[Grid]:
    """Every grid below `folder` with enough sizes to choose at."""
    grids: dict[tuple[str, Collective, int], Grid] = {}
    for path in sorted(folder.rglob("*.tsv")):
        with path.open(newline="") as text:
            reader = csv.DictReader(text, delimiter="\t")
            for row in reader if reader.fieldnames == COLUMNS else ():
                place = row["grid"], Collective[row["collective"]], int(row["n_ranks"])
                grid = grids.setdefault(place, Grid(*place, int(row["n_nodes"])))
                times_us = grid.times_us.setdefault(int(row["message_bytes"]), {})
                times_us.setdefault((row["algorithm"], row["protocol"]), []).append(float(row["duration_us"]))
    return [grid for grid in grids.values() if len(grid.places()) >= MIN_PLACES]
