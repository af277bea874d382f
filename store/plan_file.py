"""A plan as a JSON file: what `zerotune export` writes and `launch --plan` and `replay --plan` read."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from store.errors import PlanError
from store.records import Plan

PLAN_FORMAT: Final = "zerotune-plan"
PLAN_FILE_VERSION: Final = 1
MAX_FILE_BYTES: Final = 16 * 2**20


class PlanFile(msgspec.Struct, frozen=True):
    """The document: where the plan comes from, and the plan."""

    plan: Plan
    format: str = PLAN_FORMAT
    version: int = PLAN_FILE_VERSION
    fabric_id: str = ""
    job_id: str = ""
    emulated: str = ""
    """Name of the emulated fabric it was learned on; empty for real hardware."""


def write_plan(path: Path, file: PlanFile) -> None:
    """Write `file` to `path` in one piece, indented for people.

    Raises:
        PlanError: the path cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
        partial.replace(path)
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}", "choose another path") from error


def read_plan(path: Path) -> PlanFile:
    """The plan file at `path`.

    Raises:
        PlanError: it cannot be read, or is not a plan file of this version.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise PlanError(f"{path} is larger than any plan", "name a file that `zerotune export` wrote")
        text = path.read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}", "check the path") from error
    try:
        file = msgspec.json.decode(text, type=PlanFile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} is not a plan file: {error}", "name one that `zerotune export` wrote") from error
    if file.format != PLAN_FORMAT or file.version != PLAN_FILE_VERSION:
        raise PlanError(
            f"{path} is {file.format} version {file.version}, not {PLAN_FORMAT} version {PLAN_FILE_VERSION}",
            "export it again with this zerotune",
        )
    return file
