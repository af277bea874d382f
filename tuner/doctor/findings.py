"""What a check found."""

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
    """Tuning works, but not at its best; or it will work after a usual step, which the remedy names."""
    problem = "problem"
    """Nothing is tuned, or no job runs, until this is repaired."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the table."""

    code: str
    """Name of the check; scripts rely on it."""
    status: Status
    found: str
    remedy: str = ""


class Machine(msgspec.Struct, frozen=True):
    """What the checks are about: this machine, as a command with these options would use it."""

    endpoint: str
    store_path: Path
    keys_dir: Path | None
    environment: Mapping[str, str]
    root: Path = Path("/")
    """Below it are /sys, /proc and /etc."""

    def nccl_variables(self) -> dict[str, str]:
        """All of NCCL's variables in effect, from the environment or a file of NCCL's."""
        return in_effect(self.environment, self.root / "etc/nccl.conf")

    def said(self, name: str) -> str:
        """One of NCCL's variables as the user set it, and whether a file of NCCL's says it."""
        where = "" if name in self.environment else " (in ~/.nccl.conf or /etc/nccl.conf)"
        return f"{name}={self.nccl_variables()[name]}{where}"


Check = Callable[[Machine], Finding | None]
"""None: the machine has nothing that the check is about."""


def ok(code: str, found: str) -> Finding:
    """A finding of a check that passed."""
    return Finding(code, Status.ok, found)


def warning(code: str, found: str, remedy: str) -> Finding:
    """A finding that leaves tuning at work, but not at its best.

    Args:
        found: what is there instead of what should be.
    """
    return Finding(code, Status.warning, found, remedy)


def problem(code: str, found: str, remedy: str) -> Finding:
    """A finding with which nothing is tuned.

    Args:
        found: what is there instead of what should be.
    """
    return Finding(code, Status.problem, found, remedy)


def of_error(code: str, error: UserError) -> Finding:
    """A problem for which another part of zerotune would raise this error."""
    return problem(code, error.problem, error.remedy)


def may_be_made(folder: Path) -> bool:
    """Whether `folder` can be written or, where it is missing, created."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
