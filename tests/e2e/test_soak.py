"""Plans that change at every boundary: no disagreement, no record lost beyond counted drops."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_collectives", "n_ranks"),
    [(400, 4), pytest.param(100_000, 4, marks=pytest.mark.timeout(900))],
)
def test_plans_change_at_every_boundary(n_collectives, n_ranks):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "soak", "--collectives", str(n_collectives), "--ranks", str(n_ranks)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "n_disagreements" in done.stdout
