"""Real training processes that would run out of device memory: untuned they do, under the tuner they do not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jobs_that_run_out_of_memory_complete_under_the_tuner() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "memory_pressure", "--quick", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {one["metric"]: one["value"] for one in json.loads(done.stdout.splitlines()[-1])["results"]}
    for scenario in ("connect", "channels"):
        assert found[f"{scenario}_untuned_completes"] == 0
        assert found[f"{scenario}_tuned_completes"] == 1
        assert found[f"{scenario}_slowdown_percent"] <= 2
