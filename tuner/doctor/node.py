"""One node's answer: a JSON line for each fact, short enough that launchers do not cut it."""

from __future__ import annotations

import importlib.metadata
import platform
import secrets
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from ...agent.machine.adapters import described
from ...agent.nccl.compiled import PLUGIN
from ...store.errors import printable
from . import nccl
from .devices import text
from .examination import examine
from .findings import Machine, Status
from .software import gpus_and_driver

MAX_CHARACTERS: Final = 380
"""Longest value or remedy: Slurm cuts lines of more than 1,024 bytes."""


class Fact(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of an answer."""

    answer: str
    """A random id of the answer, since two answers may come from one node."""
    node: str
    kind: Literal["start", "version", "variable", "hardware", "finding", "end"]
    name: str
    value: str
    status: Status = Status.ok
    remedy: str = ""


def facts(machine: Machine) -> Iterator[Fact]:
    """All facts by which nodes are compared; the last one, `end`, counts the others."""
    answer = secrets.token_hex(4)
    node = (machine.environment.get("SLURMD_NODENAME") or platform.node())[:100]
    yield Fact(answer, node, "start", "", "")
    n_facts = 0
    for fact in _found(machine):
        n_facts += 1
        value, remedy = (printable(one)[:MAX_CHARACTERS] for one in (fact.value, fact.remedy))
        yield msgspec.structs.replace(fact, answer=answer, node=node, value=value, remedy=remedy)
    yield Fact(answer, node, "end", "", str(n_facts))


def _found(machine: Machine) -> Iterator[Fact]:
    """The facts without the names of the answer and the node."""
    gpus, driver = _gpus_and_driver()
    versions = {
        "zerotune": _installed("zerotune"),
        "torch": _installed("torch"),
        "Python": platform.python_version(),
        "NCCL": nccl.nccl_version(machine),
        "tuner plugin": PLUGIN.source_hash(),
        "driver": driver,
        "Linux": text(machine.root / "proc/sys/kernel/osrelease"),
    }
    variables = machine.nccl_variables()
    hardware = {"GPUs": gpus, "adapters": described(variables, machine.root / "sys/class")}
    yield from (Fact("", "", "version", name, value) for name, value in versions.items())
    yield from (Fact("", "", "hardware", name, value) for name, value in hardware.items())
    yield from (Fact("", "", "variable", name[:100], value) for name, value in sorted(variables.items()))
    for one in examine(machine):
        if one.status is not Status.ok:
            yield Fact("", "", "finding", one.code, one.found, one.status, one.remedy)


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus_and_driver() -> tuple[str, str]:
    try:
        return gpus_and_driver()
    except Exception:  # NVML may raise anything without a driver
        return "", ""
