"""The batch job that this process belongs to, if a scheduler started it."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import psutil

JOB_VARIABLES: Final = {
    "SLURM_JOB_ID": "Slurm",
    "PBS_JOBID": "PBS",
    "LSB_JOBID": "LSF",
    "FLUX_JOB_ID": "Flux",
}
"""Environment variables with a process's job, and their schedulers."""
SLURMS_OWN: Final = "slurmstepd"
"""The parent of all processes that Slurm starts on a node for one job step: a batch script, or one `srun`."""


class BatchJob(NamedTuple):
    """A scheduler's job, or job step, on this node."""

    name: str
    """The job in words."""
    pid: int
    """A process that lives as long as the job, or the job step, on this node."""


def batch_job() -> BatchJob | None:
    """This process's job; None if there is none, or its processes are not visible here."""
    variable = next((name for name in JOB_VARIABLES if os.environ.get(name)), None)
    if variable is None:
        return None
    job_id, top = os.environ[variable], None
    try:
        for process in (own := psutil.Process(), *own.parents()):
            if process.name() == SLURMS_OWN:
                top = process
                break
            if process.environ().get(variable) == job_id:
                top = process
    except psutil.Error:  # a process of root, above the job
        pass
    return None if top is None else BatchJob(f"job {job_id} of {JOB_VARIABLES[variable]}", top.pid)
