"""Ranks know their place on the node, whoever launched them."""

from __future__ import annotations

import pytest

from zerotune.agent.machine.launchers import local_rank, local_size

SRUN = {"SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}
SAID = {
    "torchrun": ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, 3, 8),
    "torchrun in a step of Slurm": ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "SLURM_LOCALID": "0"}, 3, 8),
    "srun, first node": (SRUN | {"SLURM_NODEID": "0"}, 2, 4),
    "srun, last node": (SRUN | {"SLURM_NODEID": "2"}, 2, 3),
    "srun without a node's number": (SRUN, 2, 11),
    "Open MPI": ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_LOCALID": "0"}, 1, 2),
    "MPICH and Intel MPI": ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, 1, 2),
    "Flux": ({"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "11", "FLUX_JOB_NNODES": "3"}, 1, 4),
    "nobody": ({}, 0, 11),
    "no numbers": ({"LOCAL_RANK": "first", "LOCAL_WORLD_SIZE": "-1", "SLURM_NODEID": "x"}, 0, 11),
    "more than there are": ({"LOCAL_WORLD_SIZE": "64"}, 0, 11),
}


@pytest.mark.parametrize(("environment", "rank", "size"), SAID.values(), ids=SAID)
def test_each_launcher_tells_the_local_rank(environment: dict[str, str], rank: int, size: int) -> None:
    assert (local_rank(environment), local_size(environment, 11)) == (rank, size)
