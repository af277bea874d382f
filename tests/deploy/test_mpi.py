"""deploy/mpi/rank.sh under a real mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.lib.free_port import free_port
from zerotune.store.sqlite.database import Store
from zerotune.tuner.client.status import fetch_status

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin"),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of a user of their own, whose daemon ends with the test."""
    folder = tmp_path / "r"
    yield {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ZEROTUNE_RUNTIME_DIR": str(folder),
        "ZEROTUNE_STORE": str(tmp_path / "store.db"),
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(free_port()),
        "LAUNCH_OPTIONS": "--fabric ethernet_boxes --name mpi",
    }
    if (status := fetch_status(f"ipc://{folder}/daemon.sock", timeout_s=5.0)) is not None:
        daemon = psutil.Process(status.daemon_pid)
        daemon.terminate()
        daemon.wait(60)


def test_ranks_of_mpirun_are_one_tuned_job_with_one_daemon(place: dict[str, str]) -> None:
    done = subprocess.run(
        ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "-x", "MASTER_PORT", "-x", "LAUNCH_OPTIONS",
         str(ROOT / "deploy" / "mpi" / "rank.sh"), str(ROOT / "zero_runtime" / "examples" / "train.py"),
         "--steps", "60", "--layers", "2", "--width", "32"],
        env=place, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("started daemon") == 1
    with Store.open(place["ZEROTUNE_STORE"], read_only=True) as store:
        (job,) = store.jobs()
        assert (job.n_ranks, job.name) == (2, "mpi")
        assert len(store.steps(job.job_id)) >= 50


def test_a_rank_that_nobody_numbered_is_refused(place: dict[str, str]) -> None:
    environment = {name: value for name, value in place.items() if not name.startswith(("OMPI_", "PMI"))}
    done = subprocess.run(
        [str(ROOT / "deploy" / "mpi" / "rank.sh"), "train.py"], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 2
