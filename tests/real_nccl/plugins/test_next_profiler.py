"""Another profiler beside ours in the real NCCL: each sees what it asked for, whether or not the other does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.nccl.other_plugins import other_profiler
from zerotune.agent.nccl.release import Release

RANKS = Path(__file__).with_name("next_profiler_ranks.py")
N_CALLS = 6


@pytest.mark.parametrize("older", [0, 1, 2])
def test_both_are_told(release, older, tmp_path):
    version, libnccl = release
    abi = Release(version).profiler_abi - older
    if version < (2, 27) or abi < 4:
        pytest.skip("not told of kernels' times, or too old for this NCCL")
    other = other_profiler(tmp_path / "other.so", abi)
    command = [sys.executable, *map(str, (RANKS, libnccl, tmp_path, other))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (found["n_calls_alone"], found["records_alone"]) == (2, 0)
    assert found["n_timed"] == 2 * N_CALLS
    assert found["both"] == [2 * N_CALLS + 2, found["n_channels"], 0]
    assert found["durations_us"] == [25.0]
    assert (found["name"], found["n_inits"], found["n_ends"], found["n_faults"]) == ("other", 2, 2, 0)
