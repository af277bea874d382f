"""What NCCL's profiler puts into a graph while it is captured costs at every replay, on the mock as on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from captured_ranks import HOST_US, KERNEL_US, N_CALLS

COUNTS_WHAT_IS_ASKED_FOR = (2, 31)
"""From here on a communicator with calls in a graph is timed no more: its kernels' times would be those of others."""
RANKS = Path(__file__).with_name("captured_ranks.py")


def test_nothing_is_put_into_a_graph_while_it_is_captured(release, tmp_path):
    version, library = release
    if version < (2, 26):
        pytest.skip("its profiler tells no times")
    command = [sys.executable, str(RANKS), str(library), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(RANKS.parents[3])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    off_us, on_us, n_timed = json.loads(done.stdout)
    assert N_CALLS * KERNEL_US <= off_us < N_CALLS * KERNEL_US + HOST_US
    assert on_us >= N_CALLS * (KERNEL_US + HOST_US), "as it would be without being told of the capture"
    assert (n_timed >= N_CALLS) == (version < COUNTS_WHAT_IS_ASKED_FOR)
