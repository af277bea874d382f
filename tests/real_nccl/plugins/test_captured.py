"""What NCCL's profiler puts into a graph while it is captured costs at every replay, on the mock as on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from captured_ranks import HOST_US, KERNEL_US, N_CALLS

NEVER_OFF = (2, 31)
"""From here on the plugin asks for kernel channels at any time, so that graphs pay at any time."""
RANKS = Path(__file__).with_name("captured_ranks.py")


def test_a_graph_that_was_captured_under_observation_is_slower(release, tmp_path):
    version, library = release
    command = [sys.executable, str(RANKS), str(library), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    off_us, on_us = json.loads(done.stdout)
    assert on_us >= N_CALLS * (KERNEL_US + HOST_US)
    if version < NEVER_OFF:
        assert N_CALLS * KERNEL_US <= off_us < N_CALLS * KERNEL_US + HOST_US
