"""`advise --watch` beside a job that trains, with its daemon's store between them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from zerotune.tuner.client.background_daemon import start_in_background

ROOT = Path(__file__).parents[2]
ZEROTUNE = (sys.executable, "-m", "zerotune.tuner.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TRAIN = (str(ROOT / "zero_runtime" / "examples" / "train.py"), "--stage", "3", "--width", "256", "--steps", "300")
MODEL = ("--layers", "4", "--hidden", "256", "--heads", "4", "--sequence", "128", "--vocabulary", "256")
WHERE = ("--fabric", "ethernet_boxes", "--nodes", "2", "--precision", "fp32")
RAN = ("--watch", "--ran", "stage=3,batch=4,bucket-mb=32,prefetch=1", "--json")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_running_job_is_told_and_the_watch_ends_with_it(tmp_path_factory):
    folder = tmp_path_factory.mktemp("w")  # sockets want short paths
    endpoint, store = f"ipc://{folder}/d.sock", folder / "s.db"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    daemon = start_in_background(endpoint, store, idle_exit_s=600)
    launch = [*ZEROTUNE, "launch", "--fabric", "ethernet_boxes", "--endpoint", endpoint, "--name", "watched", "--"]
    job = subprocess.Popen([*launch, *TORCHRUN, *TRAIN], env=environment, start_new_session=True)
    try:
        watch = [*ZEROTUNE, "advise", *MODEL, *WHERE, *RAN, "--measured", str(store), "--job", "watched"]
        while True:  # until the daemon knows of the job
            watched = subprocess.Popen(watch, env=environment, stdout=subprocess.PIPE, text=True)
            assert watched.stdout is not None
            first = watched.stdout.readline()
            if first or job.poll() is not None:
                break
            watched.wait()
            time.sleep(0.5)
        was_running = job.poll() is None
        rest = watched.communicate(timeout=400)[0]
        assert (job.wait(60), watched.returncode) == (0, 0)
    finally:
        for one in (job, daemon):
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(one.pid).children(recursive=True):
                    child.kill()
            one.kill()
            one.wait()
    assert was_running
    news = [json.loads(line) for line in (first + rest).splitlines()]
    assert 20 <= news[0]["step"] < 299  # it was told while it trained
    assert {one["change"] for one in news[0]["alternatives"]} >= {"batch"}
    for one in news[0]["alternatives"]:
        assert one["gain"]["low"] < one["gain"]["expected"] < one["gain"]["high"]
