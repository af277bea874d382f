"""Findings of checks."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ...agent.machine.nccl_variables import in_effect
from ...store.errors import UserError


class Status(enum.Enum):
    """How bad a finding is."""

    ok = "ok"
    warning = "warning"
    """Tuning works, but less well than it could; or it will work after the usual step in the remedy."""
    problem = "problem"
    """No job is tuned, or no job runs, until this is repaired."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the table."""

    code: str
    """Name of the check; scripts rely on it."""
    status: Status
    found: str
    remedy: str = ""


class Machine(msgspec.Struct, frozen=True):
    """The machine to check, as a command with these options would use it."""

    endpoint: str
    store_path: Path
    keys_dir: Path | None
    environment: Mapping[str, str]
    root: Path = Path("/")
    """The folder that contains /sys, /proc and /etc."""

    def nccl_variables(self) -> dict[str, str]:
        """All NCCL variables in effect, from the environment or NCCL's configuration files."""
        return in_effect(self.environment, self.root / "etc/nccl.conf")

    def stated(self, name: str) -> str:
        """One NCCL variable as the user set it, with a note if NCCL's configuration files set it."""
        where = "" if name in self.environment else " (in ~/.nccl.conf or /etc/nccl.conf)"
        return f"{name}={self.nccl_variables()[name]}{where}"


Check = Callable[[Machine], Finding | None]
"""None: the check does not apply to the machine."""


def ok(code: str, found: str) -> Finding:
    """A finding of a check that passed."""
    return Finding(code, Status.ok, found)


def warning(code: str, found: str, remedy: str) -> Finding:
    """A finding with which tuning works, but less well than it could; `found` is the actual state."""
    return Finding(code, Status.warning, found, remedy)


def problem(code: str, found: str, remedy: str) -> Finding:
    """A finding with which no job is tuned; `found` is the actual state."""
    return Finding(code, Status.problem, found, remedy)


def of_error(code: str, error: UserError) -> Finding:
    """The problem behind an error that another part of zerotune would raise."""
    return problem(code, error.problem, error.remedy)


def may_be_made(folder: Path) -> bool:
    """Whether `folder` can be written or, if missing, created."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
