"""Which interfaces NCCL takes of ours, and what it tells of calls that no tuner is asked about."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerotune.agent.nccl.release import Release

RANKS = Path(__file__).with_name("passages_ranks.py")
COUNT_BYTES = 1 << 19


@pytest.fixture(scope="module")
def ran(release, tmp_path_factory):
    """(version, what the plugin saw)."""
    version, library = release
    if version < (2, 22):
        pytest.skip("launches of 2.21 are not read")
    command = [sys.executable, str(RANKS), str(library), str(tmp_path_factory.mktemp("ranks"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return version, json.loads(done.stdout)


def test_nccl_takes_the_newest_interface_of_both(ran):
    version, found = ran
    known = Release(version)
    assert (found["tuner_abi"], found["profiler_abi"]) == (known.tuner_abi, known.profiler_abi)


def test_decided_calls_are_told_from_others(ran):
    version, found = ran
    if version < (2, 27):
        pytest.skip("kernels tell no times, and sends are not told of")
    expected = {"decided": [4, 8 * COUNT_BYTES, 4, 100.0], "point_to_point": [4, 4 * COUNT_BYTES, 0, 0.0]}
    assert found["seen"] == {name: pytest.approx(each, abs=0.1) for name, each in expected.items()}


def test_a_communicator_of_one_rank_is_counted_though_its_calls_are_not_seen(ran):
    _, found = ran
    assert found["one_rank_communicators"] == 1
