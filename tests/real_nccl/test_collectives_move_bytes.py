"""The collectives of NCCL's own library, in front of which the mock stands, move what they are given."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("collectives_worker.py")
N_RANKS = 3


def no_core_dumps():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def test_bytes_arrive(release, tmp_path):
    version, library = release
    if version < (2, 22):
        return  # its launches cannot be read
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), str(N_RANKS), str(tmp_path), str(library)],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(WORKER.parents[2])},
            preexec_fn=no_core_dumps,
        )
        for rank in range(N_RANKS)
    ]
    try:
        errors = [rank.communicate(timeout=100)[1].decode() for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * N_RANKS, errors
        assert all("ncclAllGather uses memory" in each for each in errors)
    finally:
        for rank in ranks:
            rank.kill()
    assert not list(Path("/dev/shm").glob("zerotune-mock-*"))
