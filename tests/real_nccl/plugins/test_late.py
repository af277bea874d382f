"""NCCL's threads come late on a busy host, and find times of later works in their ring: these are not measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from zerotune.store.records import TimingSource
from zerotune.tuner.join import OBSERVATION

RANKS = Path(__file__).with_name("late_ranks.py")
TICK_NS, KERNEL_US = 1000, 2.0


def test_a_late_thread_gives_no_call_the_times_of_another(release, tmp_path):
    _, library = release
    command = [sys.executable, str(RANKS), str(library), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    records = np.frombuffer(bytes.fromhex(found["records"]), OBSERVATION)
    assert len(records) > 0
    timed = records[records["timing_source"] == TimingSource.gpu_kernel]
    assert len(timed) > 0
    for rank, spans in enumerate(found["spans"]):
        own = timed[timed["rank"] == rank]
        first = int(records["sequence"].min())
        for record in own:
            begin_ns, end_ns = spans[int(record["sequence"]) - first]
            assert begin_ns - TICK_NS <= record["start_ns"] <= end_ns
    assert not (timed["start_ns"] % TICK_NS).any(), "the timer ticks"
    # That a thread was late is inferred: where the machine itself stops it between start and end, a call may pass.
    is_wrong = ~np.isin(timed["duration_us"], [KERNEL_US, KERNEL_US + TICK_NS / 1000])
    assert is_wrong.mean() <= 0.02
