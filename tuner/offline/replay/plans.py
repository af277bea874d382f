"""Reads static tables for the policy `table`: our plan file, NVIDIA's, RCCL's, NCCLX's or scitix's tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ....agent.nccl.catalog import find_collective, parse_algorithm, parse_protocol
from ....store.errors import PlanError, UserError, reason
from ....store.foreign.regular_file import read_file
from ....store.plan_file import MAX_FILE_BYTES, read_plan
from ....store.records import Candidate, CommunicatorClass, Phase, PlanRow
from ..tuner_tables import first_matching
from ..tuner_tables_reading import is_ncclx, read_ncclx, read_nvidia_csv

_SCITIX_COLUMNS: Final = ("coll", "nnodes", "nranks", "upto_bytes", "algo", "proto")


def plan_rows(path: Path, communicators: Sequence[CommunicatorClass] = ()) -> list[PlanRow]:
    """The rows of a file of any of these formats, in the file's order; PlanError if one is invalid.

    Rows without a phase apply to every phase. Rows for any number of nodes or ranks are repeated for each of the job's
    communicators. If rows of a table overlap, the later ones are cut.
    """
    begin = _begin(path)
    if is_ncclx(begin):
        rows = read_ncclx(path, communicators)
    elif path.suffix == ".json":
        return list(read_plan(path).plan.rows)
    else:
        is_scitix = begin.startswith(",".join(_SCITIX_COLUMNS[:4]).encode())
        rows = list(_scitix(path) if is_scitix else read_nvidia_csv(path, communicators))
    if not rows:
        raise PlanError(f"{path} has no row to follow", "name a plan file, or another tuner's table")
    return [msgspec.structs.replace(row, phase=phase) for row in first_matching(rows) for phase in Phase]


def _begin(path: Path) -> bytes:
    try:
        return read_file(path, MAX_FILE_BYTES)[:4096]
    except OSError as error:
        raise PlanError(f"cannot read {path}: {reason(error)}", "name a plan file, or another tuner's table") from error


def _scitix(path: Path) -> Iterable[PlanRow]:
    """Each row begins at the end of the previous row of the same ranks and collective; `undef` is no opinion.

    The file does not say whether `upto_bytes` is total or per rank; this reads it as total, like a tuner plugin.
    """
    with path.open(encoding="utf-8", errors="replace", newline="") as text:
        try:
            yield from _scitix_rows(path, csv.DictReader(text, restval=""))
        except csv.Error as error:
            raise PlanError(f"{path} is no CSV: {error}", f"columns are {','.join(_SCITIX_COLUMNS)}") from error


def _scitix_rows(path: Path, table: Iterable[dict[str, str]]) -> Iterable[PlanRow]:
    ends: dict[tuple[object, ...], int] = {}
    for number, row in enumerate(table, 2):
        try:
            collective = find_collective(row["coll"])
            place = CommunicatorClass(int(row["nranks"]), int(row["nnodes"]))
            upto_bytes = int(row["upto_bytes"])
            if collective is None:
                raise ValueError(f"unknown collective {row['coll']!r}")
            begin = ends.get((place, collective), -1) + 1
            ends[place, collective] = upto_bytes
            if row["algo"] == "undef":
                continue
            candidate = Candidate(parse_algorithm(row["algo"]), parse_protocol(row["proto"]))
        except (KeyError, TypeError, ValueError, UserError) as error:
            raise PlanError(f"{path}, line {number}: {error}", f"columns are {','.join(_SCITIX_COLUMNS)}") from error
        yield PlanRow(place, collective, Phase.other, max(begin, 1), upto_bytes, candidate)
