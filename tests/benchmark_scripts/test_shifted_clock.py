"""A clock that jumps: every way to ask for the time jumps with it, and waits keep their length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lib.faults.shifted_clock import ShiftedClock

YEAR_S = 365.25 * 86_400
ASKS = """
import datetime, json, sqlite3, sys, threading, time
import torch.distributed as dist

def clocks():
    (of_sqlite,) = sqlite3.connect(":memory:").execute("SELECT strftime('%s', 'now')").fetchone()
    return [time.time(), datetime.datetime.now().timestamp(), float(of_sqlite)]

def waits():
    began = time.perf_counter()
    threading.Event().wait(0.05)
    time.sleep(0.05)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(datetime.timedelta(seconds=0.2))
    try:
        store.get("never set")
    except dist.DistStoreError:
        pass
    return time.perf_counter() - began

for _ in range(3):
    print(json.dumps({"clocks": clocks(), "monotonic": time.monotonic(), "waited": waits()}), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.timeout(60)
def test_a_clock_jumps_while_a_process_runs_and_what_waits_goes_on(tmp_path: Path) -> None:
    clock = ShiftedClock(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", ASKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **clock.environment},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for wall_s, monotonic_s in ((0.0, 0.0), (10 * YEAR_S, 0.0), (-10 * YEAR_S, 3600.0)):
            if wall_s:
                clock.shift(wall_s=wall_s, monotonic_s=monotonic_s)
                process.stdin.write("\n")
                process.stdin.flush()
            told = json.loads(process.stdout.readline())
            for now in told["clocks"]:
                assert now - wall_s == pytest.approx(time.time(), abs=10.0)
            assert told["monotonic"] - monotonic_s == pytest.approx(time.monotonic(), abs=10.0)
            assert 0.2 < told["waited"] < 5.0
        process.communicate("\n", timeout=10)
    assert process.returncode == 0
