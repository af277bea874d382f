"""Two nodes of a real Slurm: the service that prolog and epilog of deploy/slurm start and end, and a job over both."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_program, slurm_cluster

from zerotune.store.sqlite.database import Store

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "deploy" / "slurm"
TRAIN = str(ROOT / "zero_runtime" / "examples" / "train.py")
SETTINGS = """
options="--share private --listen tcp://*:* --curve-keys /etc/slurm/keys"
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.getuid() != 0, reason="starts Slurm's daemons as root"),
    pytest.mark.skipif(
        missing_program() is not None, reason=f"no {missing_program()}: apt-get install slurmctld slurmd munge"
    ),
]


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    more = "Prolog=/etc/slurm/prolog.sh\nEpilog=/etc/slurm/epilog.sh"
    with tempfile.TemporaryDirectory(prefix="zt-") as folder:
        with slurm_cluster(Path(folder), more=more, apart=True) as made:
            for name in ("prolog.sh", "epilog.sh"):
                shutil.copy(SCRIPTS / name, made.folder / "etc")
            (made.folder / "etc" / "zerotune.env").write_text(SETTINGS)
            made.environment |= {
                "PATH": f"{Path(sys.executable).parent}:{made.environment['PATH']}",
                "OMP_NUM_THREADS": "1",
                "LAUNCH_OPTIONS": "--fabric ethernet_boxes",
            }
            yield made
        assert made.left_on_nodes() == []


def test_a_job_over_two_nodes_is_led_by_one_and_leaves_nothing(cluster: SlurmCluster) -> None:
    keys = cluster.folder / "etc" / "keys"
    keys.mkdir()
    made = cluster.run("zerotune", "daemon", "keys", str(keys / "0"))
    assert made.returncode == 0, made.stderr
    out = cluster.folder / "out.txt"
    done = cluster.run(
        "sbatch", "--wait", "--nodes", "2", "--ntasks-per-node", "1", "--output", str(out),
        str(SCRIPTS / "train-srun.sbatch"), TRAIN, "--steps", "2500", "--layers", "2", "--width", "32",
        TASK_PROLOG=str(SCRIPTS / "task-prolog.sh"),
    )  # fmt: skip
    log = cluster.folder / "node-n1" / "run" / "zerotune-slurm" / "log"
    assert done.returncode == 0, (done.stderr, out.read_text(), log.read_text() if log.exists() else "")
    ends_at_s = time.monotonic() + 60
    while (left := cluster.left_on_nodes()) and time.monotonic() < ends_at_s:
        time.sleep(0.2)
    assert left == []
    kept = {}
    for node in ("n1", "n2"):
        with Store.open(cluster.state_of(node) / "zerotune" / "0" / "store.db", read_only=True) as store:
            (job,) = store.jobs()
            assert (job.n_ranks, len(store.steps(job.job_id)) >= 2000) == (2, True), "each keeps its own ranks' steps"
            kept[node] = store.count_measurements()
    assert kept["n1"] > 1000
    assert kept["n2"] < kept["n1"] / 10, "what it measured, the leading one has"
