"""Plans at rest: JSON files that people can read and edit; `zerotune store export` writes, `launch --plan` reads.

    {"zerotune_plan": 1, "rows": [{"n_ranks": 16, "n_nodes": 2, "collective": "all_gather",
      "phase": "forward_gather", "min_bytes": 1, "max_bytes": 1048576,
      "algorithm": "ring", "protocol": "ll128", "n_channels": 8, "reason": "..."}]}

`algorithm` and `protocol` may be left out together (no opinion), `n_channels` and `chunk_bytes` by themselves. A row
without a phase, or of phase "any", applies to all calls. A row with a phase applies to calls whose phase is known from
their communicator's history.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from .atomic_file import users_file
from .errors import PlanError, reason
from .foreign.regular_file import read_file
from .records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol, phase_name

PLAN_FILE_VERSION: Final = 1
MAX_FILE_BYTES: Final = 16 * 2**20
MAX_ROWS: Final = 50_000
"""More rows than any job has sizes; loading a plan checks each row."""
_NO_JSON: Final = "is no plan file: it is not JSON, or cut short"

AnyEnum = TypeVar("AnyEnum", bound=IntEnum)


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    n_ranks: int
    n_nodes: int
    collective: str
    min_bytes: int
    max_bytes: int
    phase: str = phase_name(None)
    algorithm: str | None = None
    protocol: str | None = None
    n_channels: int = 0
    chunk_bytes: int = 0
    reason: str = ""


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    zerotune_plan: int
    rows: tuple[_Row, ...]
    gathers_after_step: bool = False
    fabric_id: str = ""
    job_id: str = ""
    emulated: str = ""


class PlanFile(msgspec.Struct, frozen=True):
    """A plan and its origin. Epoch and expiry belong to one job and are not in the file."""

    plan: Plan
    fabric_id: str = ""
    job_id: str = ""
    emulated: str = ""
    """Name of the emulated fabric that the plan was learned on; empty for real hardware."""


def write_plan(path: Path, file: PlanFile) -> None:
    """Write `file` to `path` in one piece; raises `UserError` if that is impossible."""
    plan = file.plan
    rows = tuple(
        _Row(
            n_ranks=row.communicator.n_ranks,
            n_nodes=row.communicator.n_nodes,
            collective=row.collective.name,
            phase=phase_name(row.phase),
            min_bytes=row.min_bytes,
            max_bytes=row.max_bytes,
            algorithm=None if row.candidate.algorithm is None else row.candidate.algorithm.name,
            protocol=None if row.candidate.protocol is None else row.candidate.protocol.name,
            n_channels=row.candidate.n_channels,
            chunk_bytes=row.candidate.chunk_bytes,
            reason=row.reason,
        )
        for row in plan.rows
    )
    document = _Document(PLAN_FILE_VERSION, rows, plan.gathers_after_step, file.fabric_id, file.job_id, file.emulated)
    with users_file(path) as partial:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def read_plan(path: Path) -> PlanFile:
    """The plan in `path`, under epoch 1. Rows that NCCL cannot follow are refused when the plan is loaded, not here.

    Raises:
        PlanError: there is no such file, it is no plan, or a row has an unknown name; the text names the row.
    """
    try:
        text = read_file(path, MAX_FILE_BYTES)
        file = msgspec.json.decode(text, type=_Document)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {reason(error)}", "name one of `zerotune store export`") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # The parser's message helps only if a field is wrong.
        why = f"is not a plan file: {error}" if isinstance(error, msgspec.ValidationError) else _NO_JSON
        problem = f"{path} {why if text else 'is empty'}"
        raise PlanError(problem, "name one that `zerotune store export` wrote") from error
    if file.zerotune_plan != PLAN_FILE_VERSION:
        raise PlanError(
            f"{path} is of plan version {file.zerotune_plan}, and this zerotune reads version {PLAN_FILE_VERSION}",
            "write it again with this version's `zerotune store export`",
        )
    if len(file.rows) > MAX_ROWS:
        raise PlanError(f"{path} has {len(file.rows):,} rows", f"a plan has at most {MAX_ROWS:,}")
    rows = tuple(_plan_row(row, f"{path}, row {number}") for number, row in enumerate(file.rows, 1))
    plan = Plan(epoch=1, rows=rows, gathers_after_step=file.gathers_after_step)
    return PlanFile(plan, file.fabric_id, file.job_id, file.emulated)


def names_chunk_sizes(path: Path) -> bool:
    """Whether the plan in `path` asks for any chunk size; False if it cannot be read."""
    try:
        return any(row.candidate.chunk_bytes for row in read_plan(path).plan.rows)
    except PlanError:
        return False


def _plan_row(row: _Row, where: str) -> PlanRow:
    algorithm = None if row.algorithm is None else _member(Algorithm, row.algorithm, where)
    protocol = None if row.protocol is None else _member(Protocol, row.protocol, where)
    try:
        candidate = Candidate(algorithm, protocol, row.n_channels, row.chunk_bytes)
        if candidate.lacks_protocol:
            raise ValueError(f"{candidate} cannot be asked for: name the protocol")
    except ValueError as error:
        raise PlanError(f"{where}: {error}", "mend the row") from error
    if not 0 <= row.min_bytes <= row.max_bytes:
        raise PlanError(f"{where}: {row.min_bytes}..{row.max_bytes} bytes are no range", "give 0 <= min <= max")
    return PlanRow(
        CommunicatorClass(row.n_ranks, row.n_nodes),
        _member(Collective, row.collective, where),
        None if row.phase == phase_name(None) else _member(Phase, row.phase, where),
        row.min_bytes,
        row.max_bytes,
        candidate,
        row.reason,
    )


def _member(kind: type[AnyEnum], name: str, where: str) -> AnyEnum:
    try:
        return kind[name]
    except KeyError:
        known = ", ".join(kind.__members__)
        raise PlanError(f"{where}: unknown {kind.__name__.lower()} {name!r}", f"use {known}") from None
