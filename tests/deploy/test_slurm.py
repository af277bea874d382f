"""`--daemon` under a real Slurm, and the scripts of deploy/slurm in it."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slurm_cluster import SlurmCluster, free_ports, missing_program, slurm_cluster

from zerotune.store.sqlite.database import Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.getuid() != 0, reason="starts Slurm's daemons as root"),
    pytest.mark.skipif(
        missing_program() is not None, reason=f"no {missing_program()}: apt-get install slurmctld slurmd munge"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
TRAIN = str(ROOT / "zero_runtime" / "examples" / "train.py")
LAUNCH = [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--daemon", "--fabric", "ethernet_boxes"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="zt-") as folder, slurm_cluster(Path(folder)) as made:
        made.environment |= {
            "PATH": f"{Path(sys.executable).parent}:{made.environment['PATH']}",
            "OMP_NUM_THREADS": "1",
            "LAUNCH_OPTIONS": "--fabric ethernet_boxes",
        }
        yield made


@pytest.fixture
def place(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a user with a fresh runtime directory and store; nothing of theirs is left behind."""
    with tempfile.TemporaryDirectory(prefix="zt-") as folder:
        yield {"ZEROTUNE_RUNTIME_DIR": folder, "ZEROTUNE_STORE": f"{folder}/s.db"}
        cluster.run("scancel", "-u", "root")
        cluster.until_idle()
        assert gone(folder), "no daemon outlives its job"


def daemons(folder: str) -> list[int]:
    """Pids of the daemons whose socket is in a folder."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if "daemon" in words and f"ipc://{folder}/daemon.sock" in words and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def gone(folder: str, timeout_s: float = 30.0) -> bool:
    ends_at_s = time.monotonic() + timeout_s
    while daemons(folder) and time.monotonic() < ends_at_s:
        time.sleep(0.1)
    return not daemons(folder)


def test_several_tasks_have_one_daemon_which_is_gone_with_a_cancelled_job(cluster, place):
    folder = place["ZEROTUNE_RUNTIME_DIR"]
    command = [*LAUNCH, "--", "sh", "-c", "echo up; sleep 300"]
    running = cluster.popen("srun", "-w", "n1", "-n", "4", "--overcommit", *command, **place)
    said, n_up = "", 0
    while n_up < 4:
        line = running.stdout.readline()
        assert line, said
        said, n_up = said + line, n_up + line.startswith("up")
    started = re.findall(r"started daemon (\d+)", said)
    assert [int(pid) for pid in started] == daemons(folder)
    assert len(started) == 1
    cluster.run("scancel", "-u", "root")
    running.communicate(timeout=60)
    assert gone(folder)


def test_a_job_that_ends_takes_its_daemon_along(cluster, place):
    done = cluster.run("srun", "-w", "n1", "-n", "2", "--overcommit", *LAUNCH, "--", "true", **place)
    assert done.returncode == 0, done.stderr
    assert "started daemon" in done.stderr
    assert gone(place["ZEROTUNE_RUNTIME_DIR"])


@pytest.mark.parametrize("script", ["train-torchrun.sbatch", "train-srun.sbatch"])
def test_the_scripts_train_tuned_ranks(cluster, place, script):
    out = Path(place["ZEROTUNE_RUNTIME_DIR"]) / "out.txt"
    (port,) = free_ports(1)
    reached = {"RENDEZVOUS": f"127.0.0.1:{port}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = cluster.run(
        "sbatch", "--wait", "-N1", "--ntasks-per-node", "1" if "torchrun" in script else "2", "--output", str(out),
        str(SCRIPTS / script), TRAIN, "--steps", "80", "--layers", "2", "--width", "32",
        TASK_PROLOG=str(SCRIPTS / "task-prolog.sh"), **place, **reached,
    )  # fmt: skip
    assert done.returncode == 0, (done.stderr, out.read_text() if out.exists() else "")
    assert gone(place["ZEROTUNE_RUNTIME_DIR"])
    with Store.open(place["ZEROTUNE_STORE"], read_only=True) as store:
        (job,) = store.jobs()
        assert (job.n_ranks, job.name) == (2, "train")
        assert len(store.steps(job.job_id)) >= 70
