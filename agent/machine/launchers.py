"""This rank's number on its node, from the variables of the launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

LOCAL_RANK: Final = (
    "LOCAL_RANK",  # torchrun
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",  # MPICH, Intel MPI
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",  # last: mpirun and torchrun may run inside a Slurm step of one task
)
LOCAL_SIZE: Final = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "PMI_LOCAL_SIZE",
)
TASKS: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")
"""Slurm's `4(x2),3`: two nodes of four tasks, and one of three."""


def local_rank(environment: Mapping[str, str]) -> int:
    """This rank's number on its node; 0 if no launcher sets it."""
    return _first(environment, LOCAL_RANK) or 0


def local_size(environment: Mapping[str, str], world_size: int) -> int:
    """Number of ranks on this node; that of the whole job if no launcher sets it."""
    n_ranks = _first(environment, LOCAL_SIZE) or _of_slurm(environment) or _of_flux(environment)
    return n_ranks if n_ranks and n_ranks <= world_size else world_size


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), None)


def _of_slurm(environment: Mapping[str, str]) -> int | None:
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    if "SLURM_LOCALID" not in environment or not environment.get("SLURM_NODEID", "").isdecimal():
        return None
    left = int(environment["SLURM_NODEID"])
    for n_tasks, n_nodes in TASKS.findall(tasks):
        left -= int(n_nodes or 1)
        if left < 0:
            return int(n_tasks)
    return None


def _of_flux(environment: Mapping[str, str]) -> int | None:
    size, n_nodes = _first(environment, ("FLUX_JOB_SIZE",)), _first(environment, ("FLUX_JOB_NNODES",))
    return -(-size // n_nodes) if size and n_nodes else None
