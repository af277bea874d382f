"""Another tuner behind ours in the real NCCL: what it answers runs, unless a plan says otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib.nccl.other_plugins import other_tuner
from zerotune.agent.nccl.release import Release

RANKS = Path(__file__).with_name("next_tuner_ranks.py")
RING, TREE = 1, 0
LL, SIMPLE = 0, 2


@pytest.mark.parametrize("abi", ["newest", 2, *(pytest.param(abi, marks=pytest.mark.slow) for abi in range(3, 7))])
def test_its_answer_runs_until_a_plan_applies(release, abi, tmp_path):
    version, libnccl = release
    newest = Release(version).tuner_abi
    # NCCL asks for no newer interface than its own; that one is tried anyway.
    if abi != "newest" and abi >= newest:
        pytest.skip(f"this NCCL asks for v{newest} at most")
    if version < (2, 26):
        pytest.skip("which channels ran is not told")
    other = other_tuner(tmp_path / "other.so", newest if abi == "newest" else abi)
    command = [sys.executable, *map(str, (RANKS, libnccl, tmp_path, other))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["cell"] == [RING, LL, 2]
    assert found["another_cell"] == [TREE, SIMPLE, 2]
    assert found["plan"] == [TREE, LL, 4]
    assert found["error"] == found["nothing"]  # NCCL's own
    assert (found["name"], found["n_communicators"]) == ("other", 2)
    # From 2.31 on estimates are asked for, too; of a v6 tuner chunk sizes, which are empty here.
    is_asked_more = version >= (2, 31) or (version >= (2, 30) and abi == "newest")
    assert found["n_faults"] > 2 if is_asked_more else found["n_faults"] == 2
