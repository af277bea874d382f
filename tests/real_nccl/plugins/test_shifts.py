"""Behind a call that they tell no profiler of, NCCL 2.31 and newer tell the times of others: these are not measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zerotune.tuner.join import OBSERVATION, Joiner, measurements_of

RANKS = Path(__file__).with_name("shifted_ranks.py")
N_CALLS, N_RANKS, CALL_US = 3, 2, 50.0


@pytest.fixture(params=["broadcast", "all_gather"])
def first_call(request):
    return request.param


def test_times_of_other_calls_are_no_measurements(newest, first_call, tmp_path):
    version, library = newest
    assert version >= (2, 31)
    command = [sys.executable, str(RANKS), str(library), str(tmp_path), first_call]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    records = np.frombuffer(bytes.fromhex(found["records"]), OBSERVATION)
    assert len(records) == N_CALLS * N_RANKS
    joiner = Joiner()
    for rank in range(N_RANKS):
        joiner.add(rank, records[records["rank"] == rank])
    measured = measurements_of(joiner.join(0.0, N_RANKS)[0])
    if first_call == "broadcast":
        assert (len(measured), found["n_impossible_times"]) == (0, N_CALLS * N_RANKS)
    else:
        assert measured["duration_us"].tolist() == pytest.approx(N_CALLS * [CALL_US], abs=0.1)
        assert found["n_impossible_times"] == 0
