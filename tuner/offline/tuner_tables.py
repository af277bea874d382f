"""Plans as tables that other tuners read: NVIDIA's CSV, RCCL's CSV, NCCLX's CSV and JSON.

RCCL has NVIDIA's columns, but leaves NCCL's own count alone where channels are -1, and what no row covers. After
projects/rccl/src/plugin/tuner/csv_tuner.cc of ROCm/rocm-systems at 96a02418.

NCCLX asks for bytes per rank (what NCCL calls nBytes, divided by the ranks) as an interval, and for ranks per node. It
does not start with a row that it cannot read. After comms/ncclx/meta/tuner/README.md of meta-pytorch/torchcomms at
46726f15.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from zerotune.agent.nccl import catalog
from zerotune.store.atomic_file import users_file
from zerotune.store.counted import counted
from zerotune.store.errors import PlanError, UserError, reason
from zerotune.store.foreign.regular_file import read_file
from zerotune.store.plan_file import MAX_FILE_BYTES
from zerotune.store.records import Candidate, CommunicatorClass, Phase, PlanRow
from zerotune.store.sqlite.database import Store
from zerotune.tuner.offline.export import (
    MAX_BYTES,
    NVIDIA_COLLECTIVES,
    NVIDIA_COLUMNS,
    NVIDIA_RANGE,
    learned_plan,
    matching,
    without_phases,
    write_nvidia_csv,
)

NCCLX_COLUMNS: Final = (
    "collective", "bytesPerRank", "algorithm", "protocol", "channels", "nNodes", "nLocalRanks", "numPipeOps", "regBuff",
    "chunkSize",
)  # fmt: skip


def write_table(to: str, rows: Sequence[PlanRow], out: Path) -> list[str]:
    """Write a plan's rows.

    Args:
        to: one of `FORMATS`.

    Returns:
        Remarks for the user: what the format cannot express.

    Raises:
        UserError: the file cannot be written, or NCCLX would take it for a CSV.
    """
    if to == "ncclx-json" and out.suffix != ".json":
        raise UserError(f"NCCLX takes {out} for a CSV", "name a file that ends in .json")
    without, n_conflicts = without_phases(rows)
    named = [
        row
        for row in without
        if row.collective in NVIDIA_COLLECTIVES and None not in (row.candidate.algorithm, row.candidate.protocol)
    ]
    text, kept = FORMATS[to](named)
    with users_file(out) as partial:
        partial.write_text(text, encoding="ascii")
    remarks = [f"{counted(len(kept), 'row')} written to {out}."]
    if n_conflicts:
        ranges = counted(n_conflicts, "size range")
        remarks.append(f"{ranges} would need a choice for each phase, which the table cannot say: the first was kept.")
    if len(kept) < len(without):
        left_out = counted(len(without) - len(kept), "row")
        remarks.append(f"{left_out} left out, without a counterpart in {to}.")
    return remarks


def export_table(to: str, store_path: Path, out: Path, job_id: str | None = None) -> list[str]:
    """Write what a job learned.

    Args:
        to: one of `FORMATS`.
        job_id: id or name of the job; None: as for `learned_plan`.

    Returns:
        Remarks for the user.

    Raises:
        UserError: as `learned_plan` and `write_table`.
        StoreError: the store cannot be read.
    """
    with Store.open(store_path, read_only=True) as store:
        file, told = learned_plan(store, job_id)
    return [*write_table(to, file.plan.rows, out), *told]


def _nvidia_csv(rows: Sequence[PlanRow]) -> tuple[str, Sequence[PlanRow]]:
    text = io.StringIO()
    write_nvidia_csv(rows, text)
    return text.getvalue(), rows


def _rccl_csv(rows: Sequence[PlanRow]) -> tuple[str, Sequence[PlanRow]]:
    lines = [
        "# Written by zerotune, for the tuner that is built into RCCL (NCCL_TUNER_CONFIG_FILE).",
        f"# {','.join(NVIDIA_COLUMNS)}",
    ]
    for row in rows:
        place, candidate = row.communicator, row.candidate
        fields = (
            NVIDIA_COLLECTIVES[row.collective], row.min_bytes, row.max_bytes, *_named(candidate),
            candidate.n_channels or -1, place.n_nodes, place.n_ranks, -1, -1,
        )  # fmt: skip
        lines.append(",".join(map(str, fields)))
    return "\n".join(lines) + "\n", rows


def _ncclx_csv(rows: Sequence[PlanRow]) -> tuple[str, Sequence[PlanRow]]:
    kept = [row for row in rows if _per_rank(row) is not None]
    lines = [
        "# Written by zerotune, for the tuner that is built into NCCLX (NCCLX_TUNER_CONFIG_FILE).",
        f"# {','.join(NCCLX_COLUMNS)}",
    ]
    for row in kept:
        place, candidate = row.communicator, row.candidate
        fields = (
            NVIDIA_COLLECTIVES[row.collective], _per_rank(row), *_named(candidate), candidate.n_channels or -1,
            place.n_nodes, place.n_ranks // place.n_nodes, -1, -1, 0,
        )  # fmt: skip
        lines.append(",".join(map(str, fields)))
    return "\n".join(lines) + "\n", kept


def _ncclx_json(rows: Sequence[PlanRow]) -> tuple[str, Sequence[PlanRow]]:
    kept = [row for row in rows if _per_rank(row) is not None]
    rules = []
    for row in kept:
        place = row.communicator
        algorithm, protocol = _named(row.candidate)
        config: dict[str, str | int] = {"algorithm": algorithm, "protocol": protocol}
        if row.candidate.n_channels:
            config["channels"] = row.candidate.n_channels
        filters = {
            "collective": NVIDIA_COLLECTIVES[row.collective],
            "bytesPerRank": _per_rank(row),
            "nNodes": place.n_nodes,
            "nLocalRanks": place.n_ranks // place.n_nodes,
        }
        rules.append({"filter": filters, "config": config})
    return msgspec.json.format(msgspec.json.encode({"rules": rules}), indent=1).decode() + "\n", kept


FORMATS: Final[dict[str, Callable[[Sequence[PlanRow]], tuple[str, Sequence[PlanRow]]]]] = {
    "nvidia-csv": _nvidia_csv,
    "rccl-csv": _rccl_csv,
    "ncclx-csv": _ncclx_csv,
    "ncclx-json": _ncclx_json,
}


def _named(candidate: Candidate) -> tuple[str, str]:
    assert candidate.algorithm is not None
    assert candidate.protocol is not None
    return candidate.algorithm.name, candidate.protocol.name


def _per_rank(row: PlanRow) -> str | None:
    """Its bytes per rank as an interval; None where no number of bytes per rank is within, or nodes are unequal."""
    n_ranks, n_nodes = row.communicator.n_ranks, row.communicator.n_nodes
    low, high = -(-row.min_bytes // n_ranks), row.max_bytes // n_ranks
    return None if n_ranks % n_nodes or low > high else f"[{low},{high}]"


# ---- reading ------------------------------------------------------------------------------------------------------


class _Filter(msgspec.Struct, rename="camel"):
    collective: str
    bytes_per_rank: str | int = "*"
    n_nodes: str | int = "*"
    n_local_ranks: str | int = "*"
    num_pipe_ops: int = -1
    reg_buff: int = -1


class _Config(msgspec.Struct, rename="camel"):
    algorithm: str
    protocol: str
    channels: int = -1
    chunk_size: int = 0


class _Rule(msgspec.Struct):
    filter: _Filter
    config: _Config


class _Rules(msgspec.Struct):
    rules: list[_Rule]


def is_ncclx(begin: bytes) -> bool:
    """Whether a file that begins so is NCCLX's: JSON with rules, or a CSV whose third column names algorithms."""
    if begin.lstrip().startswith(b"{"):
        return re.match(rb'\s*\{\s*"rules"', begin) is not None
    for line in begin.decode("utf-8", "replace").splitlines():
        if line.strip() and not line.startswith("#"):
            fields = _fields(line)
            is_named = len(fields) >= 7 and re.fullmatch(r"[a-z_]+", fields[2]) is not None
            return is_named and not set(fields) >= NVIDIA_RANGE
    return False


def read_ncclx(path: Path, communicators: Sequence[CommunicatorClass] = ()) -> list[PlanRow]:
    """Rows of NCCLX's CSV or JSON. A rule that asks for what a plan has no word for is refused.

    Args:
        communicators: those that rules for any number of nodes or ranks become rows of, as for `read_nvidia_csv`.

    Returns:
        The rows, in the file's order.

    Raises:
        PlanError: the file cannot be read, or a rule is not one.
    """
    try:
        data = read_file(path, MAX_FILE_BYTES)
        if data.lstrip().startswith(b"{"):
            return list(_rows(path, enumerate(msgspec.json.decode(data, type=_Rules).rules, 1), communicators))
        return list(_rows(path, _csv_rules(path, data.decode()), communicators))
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise PlanError(f"cannot read {path}: {reason(error)}", "name NCCLX's tuner table") from error


def _csv_rules(path: Path, text: str) -> Iterable[tuple[int, _Rule]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
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
    """Columns; commas within brackets are part of an interval."""
    return [field.strip() for field in re.split(r",(?![^\[(]*[\])])", line)]


def _rows(
    path: Path, rules: Iterable[tuple[int, _Rule]], communicators: Sequence[CommunicatorClass]
) -> Iterable[PlanRow]:
    for number, rule in rules:
        try:
            yield from _plan_rows(rule, communicators)
        except (UserError, ValueError) as error:
            raise PlanError(f"{path}, rule or line {number}: {error}", "see docs/reference/tuner-csv.md") from error


def _plan_rows(rule: _Rule, communicators: Sequence[CommunicatorClass]) -> Iterable[PlanRow]:
    asked, config = rule.filter, rule.config
    n_nodes, n_local = _exact(asked.n_nodes), _exact(asked.n_local_ranks)
    local = [one for one in communicators if n_local in (-1, one.n_ranks // max(1, one.n_nodes))]
    if (asked.num_pipe_ops, asked.reg_buff) != (-1, -1) or config.chunk_size:
        raise ValueError("numPipeOps, regBuff and chunkSize have no counterpart in a plan")
    low, high = _interval(str(asked.bytes_per_rank))
    collective = catalog.parse_collective(asked.collective)
    candidate = Candidate(
        catalog.parse_algorithm(config.algorithm), catalog.parse_protocol(config.protocol), max(config.channels, 0)
    )
    is_exact = min(n_nodes, n_local) >= 1
    for place in matching(n_nodes, n_nodes * n_local if is_exact else -1, () if is_exact else local or communicators):
        if is_exact or place in local:
            n_ranks = place.n_ranks
            span = min(low * n_ranks, MAX_BYTES), min(high * n_ranks + n_ranks - 1, MAX_BYTES)
            yield PlanRow(place, collective, Phase.other, *span, candidate)


def _exact(value: str | int) -> int:
    """The number; -1: any."""
    low, high = _interval(str(value))
    if (low, high) == (0, MAX_BYTES):
        return -1
    if not 1 <= low == high < 2**20:
        raise ValueError("rows for several numbers of nodes or ranks have no counterpart in a plan")
    return low


def _interval(text: str) -> tuple[int, int]:
    """Smallest and largest whole number that `*`, `5`, `[1,5]`, `(1,5]`, `(,5)` ... stands for, none below 0."""
    text = text.strip()
    if text == "*":
        return 0, MAX_BYTES
    if re.fullmatch(r"\d{1,19}", text):
        return int(text), int(text)
    found = re.fullmatch(r"([\[(])\s*(\d{0,19})\s*,\s*(\d{0,19})\s*([\])])", text)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no interval")
    low = int(found[2] or 0) + (found[1] == "(" and bool(found[2]))
    high = int(found[3]) - (found[4] == ")") if found[3] else MAX_BYTES
    if low > high:
        raise ValueError(f"{text[:40]!r} is empty")
    return low, high
