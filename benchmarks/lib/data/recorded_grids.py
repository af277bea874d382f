"""Grids (settings x sizes) that somebody measured and published: what a sweep would have had to choose from.

Reads every file below a folder that holds nccl-tests rows, inside logs or Markdown. What was forced is told
by the last heading or command line above the rows (`NCCL_PROTO=LL`, `Ring/Simple`, `DEFAULT`), else by the
file's name (`ring-100g`). Rows under anything else that was changed are left out: those are other machines.

`python -m benchmarks recorded_grids DIR > GRIDS.tsv` leaves the figures of all that; such a file is read, too.
"""

from __future__ import annotations

import csv
import gzip
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from benchmarks.lib.reporting import say
from zerotune.agent.nccl.catalog import find_collective
from zerotune.store.records import BASELINE, Algorithm, Candidate, Collective, Protocol
from zerotune.store.sqlite.rows.runnable import can_run

Setting = tuple[str, str]
"""(algorithm, protocol) in lower case; empty = NCCL's own choice."""

_NUMBER: Final = r"([\d,]+(?:\.\d+)?(?:e[+-]?\d+)?)"
_TEST_ROW: Final = re.compile(rf"^\s*(\d+)\s+\d+\s+[a-z]\w*(?:\s+[a-z]+)?(?:\s+(?:-1|0))?\s+{_NUMBER}\s+[\d.]")
_BARE_ROW: Final = re.compile(rf"^\s+(\d+)\s+{_NUMBER}\s*(?:us|µs)")
_PROTOCOL: Final = re.compile(r"PROTO=(Simple|LL128|LL)\b", re.IGNORECASE)
_ALGORITHM: Final = re.compile(r"ALGO=(Ring|Tree|NVLS|PAT)\b", re.IGNORECASE)
_PAIR: Final = re.compile(r"\b(Ring|Tree|NVLS|PAT)/(Simple|LL128|LL)\b", re.IGNORECASE)
_OTHERWISE: Final = re.compile(
    r"NTHREADS|NSOCKS|NCHANNELS|CTAS|BUFFSIZE|SHM_DISABLE\)|nch=|reg\d|P2P Enabled|AGENT", re.IGNORECASE
)
_STARTING: Final = re.compile(r"\b([a-z_]+)_perf\b")
"""A benchmark by its name; rows of one that measures no collective of ours are left out."""
_MENTIONED: Final = re.compile(r"\b(all_?reduce|all_?gather|reduce_?scatter|broadcast)", re.IGNORECASE)
_RANK: Final = re.compile(r"^#\s+Rank\s+\d+\s.*?\bon\s+(\S+)\s+device")
_RANKS_NAMED: Final = re.compile(r"(\d)[- ]?(?:ranks?|gpu)\b", re.IGNORECASE)
COLUMNS: Final = ["grid", "collective", "n_ranks", "n_nodes", "message_bytes", "algorithm", "protocol", "duration_us"]
"""Of a table of grids; algorithm and protocol are empty where NCCL chose."""
_FORCED_FILE: Final = re.compile(r"(?:^|__)(ring|tree)-")
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
        """All recorded microseconds by size and setting, where two settings or more were measured.

        What NCCL cannot run it did not, whatever a heading says.
        """
        found = {
            size: {candidate: times for one, times in known.items() if self._can_run(candidate := candidate_of(one))}
            for size, known in sorted(self.times_us.items())
        }
        return {size: known for size, known in found.items() if len(known) > 1}

    def _can_run(self, candidate: Candidate) -> bool:
        return can_run(self.collective, candidate.algorithm, candidate.protocol, self.n_nodes)


def candidate_of(setting: Setting) -> Candidate:
    """The setting as a candidate; a protocol without algorithm is the ring's."""
    algorithm, protocol = setting
    if setting == ("", ""):
        return BASELINE
    return Candidate(Algorithm[algorithm or "ring"], Protocol[protocol or "simple"])


def load(folder: Path) -> list[Grid]:
    """Every grid below `folder` with enough sizes to choose at."""
    grids: dict[tuple[str, Collective, int], Grid] = {}
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        if path.suffix == ".tsv":
            for name, collective, n_ranks, n_nodes, size, setting, time_us in _of_table(path):
                grid = grids.setdefault((name, collective, n_ranks), Grid(name, collective, n_ranks, n_nodes))
                grid.times_us.setdefault(size, {}).setdefault(setting, []).append(time_us)
            continue
        if path.suffix not in (".md", ".txt", ".log", ".gz"):
            continue
        try:
            rows = list(_rows(path))
        except (OSError, EOFError, zlib.error) as error:
            say(f"{path}: left out, it cannot be read ({error})")
            continue
        for collective, n_ranks, n_nodes, size, setting, time_us in rows:
            # Packed logs of one setting each form a grid together; a document is a grid of its own.
            stem = path.name.removesuffix(".gz").rpartition(".")[0]
            is_part = path.suffix == ".gz" and ".md" not in path.suffixes
            name = path.parent.name if is_part else f"{path.parent.name}/{stem}"
            grid = grids.setdefault((name, collective, n_ranks), Grid(name, collective, n_ranks, n_nodes))
            grid.times_us.setdefault(size, {}).setdefault(setting, []).append(time_us)
    return [grid for grid in grids.values() if len(grid.places()) >= MIN_PLACES]


def _of_table(path: Path) -> Iterator[tuple[str, Collective, int, int, int, Setting, float]]:
    with path.open(newline="") as text:
        reader = csv.DictReader(text, delimiter="\t")
        if reader.fieldnames != COLUMNS:
            return
        for row in reader:
            place = row["grid"], Collective[row["collective"]], int(row["n_ranks"]), int(row["n_nodes"])
            yield *place, int(row["message_bytes"]), (row["algorithm"], row["protocol"]), float(row["duration_us"])


def write(grids: Iterable[Grid], text: TextIO) -> None:
    """The figures of grids, a line per time."""
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(COLUMNS)
    for grid in grids:
        for size, settings in grid.times_us.items():
            for setting, times_us in settings.items():
                place = grid.name, grid.collective.name, grid.n_ranks, grid.n_nodes, size, *setting
                writer.writerows([*place, time_us] for time_us in times_us)


def _rows(path: Path) -> Iterator[tuple[Collective, int, int, int, Setting, float]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as text:
        lines = text.read().splitlines()
    words = "\n".join(lines[:40])
    mentioned = _MENTIONED.search(path.name) or _MENTIONED.search(words)
    collective = find_collective(mentioned[1]) if mentioned else Collective.all_reduce
    named = _RANKS_NAMED.search(path.name) or _RANKS_NAMED.search(path.parent.name)
    n_ranks_named = int(named[1]) if named else 2
    hosts: list[str] = []
    forced = _FORCED_FILE.search(path.name)
    setting: Setting | None = (forced[1], "") if forced else ("", "")
    in_hosts = False
    for line in lines:
        rank = _RANK.match(line)
        if rank:
            hosts = [*hosts, rank[1]] if in_hosts else [rank[1]]
            in_hosts = True
            continue
        row = _TEST_ROW.match(line) or _BARE_ROW.match(line)
        if row is None:
            in_hosts = in_hosts and line.startswith("#") and "Rank" in line
            starting = _STARTING.search(line)
            if starting:
                collective = find_collective(starting[1])
            if line.startswith(("##", "===", "mpirun")):
                setting = _setting_of(line)
                found = _MENTIONED.search(line) if line.startswith("#") else None
                collective = find_collective(found[1]) if found else collective
            continue
        in_hosts = False
        time_us = float(row[2].replace(",", ""))
        if setting is None or collective is None or not int(row[1]) or not time_us > 0:
            continue
        n_ranks = len(hosts) or n_ranks_named
        # A document that forces the socket network makes a node of every rank.
        n_nodes = len(set(hosts)) if len(set(hosts)) > 1 else n_ranks if "socket" in words.lower() else 1
        yield collective, n_ranks, n_nodes, int(row[1]), setting, time_us


def _setting_of(line: str) -> Setting | None:
    """What a heading or command line says was forced; None: something else was changed, too."""
    if _OTHERWISE.search(line):
        return None
    pair = _PAIR.search(line)
    if pair:
        return pair[1].lower(), pair[2].lower()
    algorithm, protocol = _ALGORITHM.search(line), _PROTOCOL.search(line)
    return (algorithm[1].lower() if algorithm else "", protocol[1].lower() if protocol else "")


if __name__ == "__main__":
    write(load(Path(sys.argv[1])), sys.stdout)
