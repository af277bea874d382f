"""A daemon whose clock runs away."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_daemon_whose_clock_jumps_by_hours_serves_on():
    command = [sys.executable, "-m", "benchmarks", "soak_daemon", "--collectives", "10000", "--hours", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {one["metric"]: one["value"] for one in json.loads(done.stdout.splitlines()[-1])["results"]}
    assert told["n_disagreements"] == 0
    assert told["the_daemon_answers"] == 1
    assert told["hours_of_the_daemons_clock"] >= 3
