"""`advise --measured` with what a job left behind: a store, a trace, and the book of its fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerotune.tuner.client.background_daemon import start_in_background

ROOT = Path(__file__).parents[2]
ZEROTUNE = (sys.executable, "-m", "zerotune.tuner.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TRAIN = (str(ROOT / "zero_runtime" / "examples" / "train.py"), "--layers", "2", "--width", "256", "--steps", "60")
MODEL = ("--layers", "2", "--hidden", "256", "--heads", "4", "--sequence", "128", "--vocabulary", "256")
WHERE = ("--fabric", "ethernet_boxes", "--nodes", "2", "--precision", "fp32")
ASKED = (*MODEL, *WHERE, "--stage", "3", "--batch", "2")


def zerotune(*words: str | Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([*ZEROTUNE, *map(str, words)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def width(step: dict[str, float]) -> float:
    return step["high"] / step["low"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_jobs_store_trace_and_book_replace_assumptions(tmp_path_factory):
    pytest.importorskip("pyarrow")
    pytest.importorskip("duckdb")
    folder = tmp_path_factory.mktemp("m")  # sockets want short paths
    endpoint, store = f"ipc://{folder}/d.sock", folder / "s.db"
    daemon = start_in_background(endpoint, store, options=("--fleet", str(folder / "fleet"), "--contributor", "me"))
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        launch = ("launch", "--fabric", "ethernet_boxes", "--endpoint", endpoint, "--log-trace", folder / "trace", "--")
        zerotune(*launch, *TORCHRUN, *TRAIN, env=environment)
    finally:
        daemon.terminate()  # it writes to the store and to the fleet what waits
        daemon.wait(30)
    zerotune("store", "book", "build", folder / "fleet", "--out", folder / "f.book")

    assumed = json.loads(zerotune("advise", *ASKED, "--json"))
    assert assumed["measured"] == []
    ran = ("--ran", "stage=3,batch=4")
    for measured in [(folder / "f.book",), (folder / "trace",), (store,), (store, *ran)]:
        found = json.loads(zerotune("advise", *ASKED, "--json", "--measured", *measured))
        assert len(found["measured"]) == (3 if ran[0] in measured else 1), found["measured"]
        assert set(found["assumptions"]) < set(assumed["assumptions"])
        for before, after in zip(assumed["choices"], found["choices"], strict=True):
            assert width(after["step"]["step_s"]) < width(before["step"]["step_s"])
