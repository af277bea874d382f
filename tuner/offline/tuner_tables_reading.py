"""Reads other tuners' tables as rows of a plan; tuner_tables.py describes the formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ...agent.nccl import catalog
from ...store.errors import PlanError, UserError, reason
from ...store.foreign.regular_file import read_file
from ...store.plan_file import MAX_FILE_BYTES
from ...store.records import Candidate, CommunicatorClass, Phase, PlanRow
from .tuner_tables import NCCLX_COLUMNS, NVIDIA_COLUMNS, _Config, _Filter, _Rule, _Rules

_NVIDIA_RANGE: Final = frozenset(NVIDIA_COLUMNS[1:3])
_MAX_LINE: Final = 255
_MAX_BYTES: Final = 2**62
"""End of an open range: NVIDIA's plugin reads -1 as the largest number, which no row of a plan can hold."""


def read_nvidia_csv(path: Path, communicators: Sequence[CommunicatorClass] = ()) -> list[PlanRow]:
    """Rows of NVIDIA's CSV as its plugin reads them, in the file's order.

    Names that the plugin would misread raise PlanError, like invalid rows. A row for any number of ranks or nodes (-1)
    becomes one row for each of `communicators` that it matches. It is refused if there are none.
    """
    try:
        text = read_file(path, MAX_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {reason(error)}", "name a tuner CSV") from error
    rows: list[PlanRow] = []
    for number, line in _lines(text):
        try:
            rows += _nvidia_rows(line, communicators)
        except (UserError, ValueError) as error:
            remedy = f"name a table with the columns {','.join(NVIDIA_COLUMNS)}"
            raise PlanError(f"{path}, line {number}: {error}", remedy) from error
    return rows


def _nvidia_rows(line: str, communicators: Sequence[CommunicatorClass]) -> Iterable[PlanRow]:
    fields = [field.strip() for field in line.split(",")]
    if not 8 <= len(fields) <= 10 or len(line) > _MAX_LINE:
        raise ValueError(f"{len(fields)} fields in {len(line)} characters")
    if set(fields) >= _NVIDIA_RANGE:
        raise ValueError("it names columns: write # before it, and have the columns in their order")
    min_bytes, max_bytes, n_channels, n_nodes, n_ranks = (_whole(fields[at], at) for at in (1, 2, 5, 6, 7))
    max_bytes = _MAX_BYTES if max_bytes == -1 else min(max_bytes, _MAX_BYTES)
    if not 0 <= min_bytes <= max_bytes:
        raise ValueError(f"{min_bytes}..{max_bytes} bytes are no range")
    collective = catalog.parse_collective(fields[0])
    candidate = _candidate(fields[3], fields[4], n_channels)
    return [
        PlanRow(communicator, collective, Phase.other, min_bytes, max_bytes, candidate)
        for communicator in _matching(n_nodes, n_ranks, communicators)
    ]


def _whole(text: str, column: int) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{NVIDIA_COLUMNS[column]} {text[:40]!r} is no whole number") from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are no comment, with their numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line


def _candidate(algorithm: str, protocol: str, n_channels: int) -> Candidate:
    return Candidate(catalog.parse_algorithm(algorithm), catalog.parse_protocol(protocol), max(n_channels, 0))


def _matching(n_nodes: int, n_ranks: int, communicators: Sequence[CommunicatorClass]) -> Sequence[CommunicatorClass]:
    """The row's own communicator if it names one, else those that it matches; a number of -1 matches any.

    Raises ValueError if the numbers are impossible, or no communicator is known.
    """
    if n_nodes >= 1 and n_ranks >= 1:
        return (CommunicatorClass(n_ranks, n_nodes),)
    if not {-1} >= {number for number in (n_nodes, n_ranks) if number < 1}:
        raise ValueError(f"{n_nodes} nodes and {n_ranks} ranks are no communicator (-1 is any number)")
    if not communicators:
        raise ValueError("rows for any number of nodes or ranks need a job whose numbers are known")
    return [one for one in communicators if n_nodes in (-1, one.n_nodes) and n_ranks in (-1, one.n_ranks)]


def is_ncclx(begin: bytes) -> bool:
    """Whether a file with this beginning is NCCLX's: JSON with rules, or a CSV with algorithms in column three."""
    if begin.lstrip().startswith(b"{"):
        return re.match(rb'\s*\{\s*"rules"', begin) is not None
    for _, line in _lines(begin.decode("utf-8", "replace")):
        fields = _fields(line)
        is_named = len(fields) >= 7 and re.fullmatch(r"[a-z_]+", fields[2]) is not None
        return is_named and not set(fields) >= _NVIDIA_RANGE
    return False


def read_ncclx(path: Path, communicators: Sequence[CommunicatorClass] = ()) -> list[PlanRow]:
    """Rows of NCCLX's CSV or JSON, in the file's order; PlanError for a rule that a plan cannot express.

    `communicators` are used as by `read_nvidia_csv`.
    """
    try:
        data = read_file(path, MAX_FILE_BYTES)
        if data.lstrip().startswith(b"{"):
            return list(_ncclx_rows(path, enumerate(msgspec.json.decode(data, type=_Rules).rules, 1), communicators))
        return list(_ncclx_rows(path, _csv_rules(path, data.decode()), communicators))
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise PlanError(f"cannot read {path}: {reason(error)}", "name NCCLX's tuner table") from error


def _csv_rules(path: Path, text: str) -> Iterable[tuple[int, _Rule]]:
    for number, line in _lines(text):
        fields: list[Any] = [*_fields(line), "", "", ""][: len(NCCLX_COLUMNS)]
        try:
            if len(fields) < len(NCCLX_COLUMNS):
                raise ValueError(f"{len(fields) - 3} fields")
            channels, pipe_ops, registered = (int(fields[at] or -1) for at in (4, 7, 8))
            filters = _Filter(fields[0], fields[1], fields[5], fields[6], pipe_ops, registered)
            yield number, _Rule(filters, _Config(fields[2], fields[3], channels, int(fields[9] or 0)))
        except ValueError as error:
            raise PlanError(f"{path}, line {number}: {error}", f"columns are {','.join(NCCLX_COLUMNS)}") from error


def _fields(line: str) -> list[str]:
    """Columns of a line; commas within brackets are part of an interval."""
    return [field.strip() for field in re.split(r",(?![^\[(]*[\])])", line)]


def _ncclx_rows(
    path: Path, rules: Iterable[tuple[int, _Rule]], communicators: Sequence[CommunicatorClass]
) -> Iterable[PlanRow]:
    for number, rule in rules:
        try:
            yield from _rows_of(rule, communicators)
        except (UserError, ValueError) as error:
            raise PlanError(f"{path}, rule or line {number}: {error}", "see docs/reference/formats.md") from error


def _rows_of(rule: _Rule, communicators: Sequence[CommunicatorClass]) -> Iterable[PlanRow]:
    asked, config = rule.filter, rule.config
    n_nodes, n_local = _exact(asked.n_nodes), _exact(asked.n_local_ranks)
    local = [one for one in communicators if n_local in (-1, one.n_ranks // max(1, one.n_nodes))]
    if (asked.num_pipe_ops, asked.reg_buff) != (-1, -1) or config.chunk_size:
        raise ValueError("numPipeOps, regBuff and chunkSize have no counterpart in a plan")
    low, high = _interval(str(asked.bytes_per_rank))
    collective = catalog.parse_collective(asked.collective)
    candidate = _candidate(config.algorithm, config.protocol, config.channels)
    is_exact = min(n_nodes, n_local) >= 1
    for place in _matching(n_nodes, n_nodes * n_local if is_exact else -1, () if is_exact else local or communicators):
        if is_exact or place in local:
            n_ranks = place.n_ranks
            span = min(low * n_ranks, _MAX_BYTES), min(high * n_ranks + n_ranks - 1, _MAX_BYTES)
            yield PlanRow(place, collective, Phase.other, *span, candidate)


def _exact(value: str | int) -> int:
    """The number; -1: any."""
    low, high = _interval(str(value))
    if (low, high) == (0, _MAX_BYTES):
        return -1
    if not 1 <= low == high < 2**20:
        raise ValueError("rows for several numbers of nodes or ranks have no counterpart in a plan")
    return low


def _interval(text: str) -> tuple[int, int]:
    """Smallest and largest whole number from 0 on that `*`, `5`, `[1,5]`, `(1,5]`, `(,5)` ... stands for."""
    text = text.strip()
    if text == "*":
        return 0, _MAX_BYTES
    if re.fullmatch(r"\d{1,19}", text):
        return int(text), int(text)
    found = re.fullmatch(r"([\[(])\s*(\d{0,19})\s*,\s*(\d{0,19})\s*([\])])", text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no interval")
    low = int(found[2] or 0) + (found[1] == "(" and bool(found[2]))
    high = int(found[3]) - (found[4] == ")") if found[3] else _MAX_BYTES
    if low > high:
        raise ValueError(f"{text[:40]!r} is empty")
    return low, high
