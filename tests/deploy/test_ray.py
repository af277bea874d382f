"""deploy/ray/train.py under a real Ray, which it starts on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from zerotune.store.sqlite.database import Store
from zerotune.tuner.client.background_daemon import start_in_background
from zerotune.tuner.client.status import fetch_status

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path, for the sake of sockets; no process that names it is left behind."""
    pytest.importorskip("ray.train", reason="no Ray: pip install 'zerotune[cluster]'")
    with tempfile.TemporaryDirectory(prefix="zt-") as folder:
        yield Path(folder)
        ends_at_s = time.monotonic() + 60
        while (left := processes_of(folder)) and time.monotonic() < ends_at_s:
            time.sleep(0.2)
        assert left == []


def processes_of(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ZEROTUNE_RUNTIME_DIR") == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_rays_workers_are_one_tuned_job_that_ends_in_good_order(place: Path) -> None:
    endpoint, store_path = f"ipc://{place}/daemon.sock", place / "store.db"
    environment = os.environ | {
        "ZEROTUNE_RUNTIME_DIR": str(place),
        "ZEROTUNE_FABRIC": "ethernet_boxes",
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": str(place),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    daemon = start_in_background(endpoint, store_path, idle_exit_s=600)
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "deploy" / "ray" / "train.py"), "--steps", "200", "--width", "64"],
            env=environment, cwd=place, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        status = fetch_status(endpoint, timeout_s=30)
        assert status is not None
        (ended,) = status.ended
        assert (ended.name, ended.step, ended.fell_silent) == ("ray-train", 199, False)
    finally:
        daemon.terminate()
        daemon.wait(60)
    with Store.open(store_path, read_only=True) as store:
        (job,) = store.jobs()
        assert (job.n_ranks, job.is_lost) == (2, False)
        assert len(store.steps(job.job_id)) >= 190
