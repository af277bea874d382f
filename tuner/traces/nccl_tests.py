"""nccl-tests' printed tables, alone or inside a log or a Markdown file; several runs in one file.

Sizes are total bytes. Out-of-place and in-place times become two records. Ranks, hosts and the collective
come from the header of the run; forced settings only from NCCL's own remark that the environment set them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from store.errors import UserError
from store.records import Algorithm, Collective, Observation, Protocol, TimingSource
from tuner.traces.files import line_chunks
from tuner.traces.records import Block, Counters, Summary, blocks_of, communicator_id

_ROW: Final = re.compile(
    rb"^\s*(\d+)\s+\d+\s+([a-z_]\w*)(?:\s+([a-z]\w*))?(?:\s+-?\d+)?"
    rb"\s+([\d.]+(?:e[+-]?\d+)?)\s+[\d.]+(?:e[+-]?\d+)?\s+[\d.]+(?:e[+-]?\d+)?\s+(\S+)"
    rb"(?:\s+([\d.]+(?:e[+-]?\d+)?)\s+[\d.]+(?:e[+-]?\d+)?\s+[\d.]+(?:e[+-]?\d+)?\s+(\S+))?"
)
_RANK: Final = re.compile(rb"^#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_RUN: Final = re.compile(rb"^# (?:nThread|nccl-tests version)")
_STARTING: Final = re.compile(rb"^# Collective test starting: (\w+)")
_PROGRAM: Final = re.compile(rb"\b((?:all_reduce|all_gather|reduce_scatter|broadcast|reduce|alltoall)_perf\w*)")
_FORCED: Final = re.compile(rb"NCCL_(ALGO|PROTO) set by environment to (\S+)")


def matches(begin: bytes) -> bool:
    """A table's heading, or the first lines of a run."""
    return (b"algbw" in begin and b"busbw" in begin) or b"# nThread" in begin or b"# nccl-tests version" in begin


@dataclass
class _Run:
    """What the lines before a table have told."""

    collective: Collective | None = None
    hosts: list[bytes] = field(default_factory=list)
    n_ranks: int = 0
    in_header: bool = False
    algorithm: Algorithm | None = None
    protocol: Protocol | None = None


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """Two records per row of a table."""
    named = find_collective(re.split(r"[.]|__|_quiet", path.name)[0].removeprefix("nccl_")) or _named_in(path)
    yield from blocks_of(_observations(path, named, summary))


def _named_in(path: Path) -> Collective | None:
    """The collective that a file's name speaks of, if one only."""
    found = {
        collective
        for word in ("all_reduce", "all_gather", "reduce_scatter", "allreduce", "allgather", "reducescatter")
        if word in path.name.lower() and (collective := find_collective(word)) is not None
    }
    return found.pop() if len(found) == 1 else None


def _observations(path: Path, named: Collective | None, summary: Summary) -> Iterator[Observation]:
    run = _Run(collective=named)
    counters = Counters()
    n_runs = 0
    for chunk in line_chunks(path):
        for line in chunk.split(b"\n"):
            row = _ROW.match(line)
            if row is not None:
                run.in_header = False
                yield from _records(row, run, n_runs, counters, summary)
                continue
            if b"_perf" in line and (program := _PROGRAM.search(line)) is not None:
                run.collective = find_collective(program[1].decode()) or run.collective
            if line.startswith(b"#"):
                if _RUN.match(line) and not run.in_header:
                    n_runs += 1
                    run = _Run(collective=run.collective, in_header=True)
                rank = _RANK.match(line)
                if rank is not None:
                    run.n_ranks += 1
                    run.hosts.append(rank[3])
                starting = _STARTING.match(line)
                if starting is not None:
                    run.collective = find_collective(starting[1].decode()) or run.collective
                if line.startswith(b"# Out of bounds"):
                    run.in_header = False
            elif b"set by environment" in line and (forced := _FORCED.search(line)) is not None:
                _force(run, forced[1], forced[2].decode("utf-8", "replace"))
    if not n_runs:
        summary.note(f"{path.name} has no run's header: ranks and nodes are unknown")


def _force(run: _Run, which: bytes, value: str) -> None:
    """Takes a setting only if it names exactly one algorithm or protocol."""
    try:
        if which == b"ALGO":
            run.algorithm = parse_algorithm(value.rstrip(".").split(":")[-1])
        else:
            run.protocol = parse_protocol(value.rstrip("."))
    except UserError:
        return


def _records(
    row: re.Match[bytes], run: _Run, n_runs: int, counters: Counters, summary: Summary
) -> Iterator[Observation]:
    message_bytes = int(row[1][:18])
    if message_bytes == 0:
        summary.skip("rows of size 0")
        return
    if run.collective is None:
        summary.skip("rows of a table that does not say which collective")
        return
    comm_id = communicator_id("nccl-tests", n_runs, run.n_ranks)
    known = run.algorithm is not None and run.protocol is not None
    for time_text, wrong_text in ((row[4], row[5]), (row[6], row[7])):
        if time_text is None:
            continue
        duration_us = float(time_text)
        if wrong_text not in (b"0", b"N/A", b"0e+00") and not _is_zero(wrong_text):
            summary.skip("rows with wrong results")
            continue
        if not 0 < duration_us < 1e12:
            summary.skip("rows without a time")
            continue
        yield Observation(
            sequence=counters.next(comm_id, run.collective),
            collective=run.collective,
            message_bytes=message_bytes,
            n_ranks=run.n_ranks,
            n_nodes=len(set(run.hosts)) or None,
            comm_id=comm_id,
            datatype=row[2].decode(),
            algorithm=run.algorithm if known else None,
            protocol=run.protocol if known else None,
            duration_us=duration_us,
            timing_source=TimingSource.reported,
        )


def _is_zero(text: bytes | None) -> bool:
    try:
        return text is not None and float(text) == 0.0
    except ValueError:
        return False
