"""The batch job that this process belongs to, where a scheduler started it."""

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
"""Where each scheduler says which job a process is of."""
SLURMS_OWN: Final = "slurmstepd"
"""The parent of all that Slurm starts on a node for one step: a batch script, or the tasks of one `srun`."""


class BatchJob(NamedTuple):
    """What the scheduler runs on this node."""

    name: str
    """In words."""
    pid: int
    """A process that lives for as long as the job, or the step, does on this node."""


def batch_job() -> BatchJob | None:
    """The job that this process is of; None where there is none, or its processes are not seen here."""
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
    except psutil.Error:  # root's, above the job
        pass
    return None if top is None else BatchJob(f"job {job_id} of {JOB_VARIABLES[variable]}", top.pid)
