"""Checks of NCCL's variables that were set for another machine, or for debugging."""

from __future__ import annotations

from pathlib import Path

from ...agent.machine.adapters import is_chosen
from .devices import gpus, text
from .findings import Finding, Machine, Status, problem, warning


def interfaces(machine: Machine) -> Finding | None:
    """Whether NCCL_SOCKET_IFNAME matches an interface that NCCL can use."""
    choice = machine.nccl_variables().get("NCCL_SOCKET_IFNAME", "")
    here = [one for one in sorted((machine.root / "sys/class/net").glob("*")) if text(one / "operstate") != "down"]
    if not choice or not here or any(is_chosen(one.name, choice) for one in here):
        return None
    names = " ".join(one.name for one in here)
    found = f"{machine.stated('NCCL_SOCKET_IFNAME')} names no interface that is here and up: {names}"
    remedy = "unset NCCL_SOCKET_IFNAME, or name one of these: NCCL ends such jobs"
    return problem("interfaces", found, remedy) if gpus(machine.root) else warning("interfaces", found, remedy)


def nccl_files(machine: Machine) -> Finding | None:
    """Whether the files exist that NCCL should read; it goes on without a topology, but ends without a graph."""
    variables = machine.nccl_variables()
    missing = [
        name
        for name in ("NCCL_GRAPH_FILE", "NCCL_TOPO_FILE")
        if name in variables and not Path(variables[name]).is_file() and (name == "NCCL_GRAPH_FILE" or variables[name])
    ]
    if not missing:
        return None
    found = f"{' '.join(map(machine.stated, missing))}: there is no such file"
    if "NCCL_GRAPH_FILE" in missing and gpus(machine.root):
        return problem("nccl_files", found, "unset it: NCCL ends such jobs")
    return warning("nccl_files", found, "unset it, or name the file of this machine")


def logging(machine: Machine) -> Finding | None:
    """Whether NCCL writes a line for each call."""
    variables = machine.nccl_variables()
    level, subsystems = (variables.get(name, "").upper() for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"))
    of_calls = not subsystems.startswith("^") and {"ALL", "COLL", "CALL"} & set(subsystems.split(","))
    if level != "TRACE" and not (level == "INFO" and of_calls):
        return None
    settings = " ".join(machine.stated(name) for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS") if name in variables)
    return Finding("logging", Status.warning, f"{settings}: NCCL may write a line for each call", "set NCCL_DEBUG=WARN")
