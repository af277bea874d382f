"""A handful of the faults and power cuts that `python -m benchmarks store_faults` makes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.service.store_faults import SCENARIOS, Tally, Worker, build, gathered, jobs_of, name_of, scratch_folder

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the shim needs a C compiler")
KINDS = ("write", "sync", "rename", "unlink", "open", "read", "malloc", "cut")
"""One of each, in each scenario."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with scratch_folder() as scratch, Worker(build(scratch), scratch) as running:
        running.ask(do="templates")
        yield running


@pytest.fixture(scope="module")
def jobs(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return jobs_of(worker, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_acknowledged_rows_survive_faults_and_power_cuts(
    worker: Worker, jobs: list[dict[str, Any]], scenario: str
) -> None:
    tally, chance = Tally(), random.Random(scenario)
    for kind in KINDS:
        there = [job for job in jobs if job["scenario"] == scenario and job.get("kind", "cut") == kind]
        for job in gathered(chance.sample(there, min(1, len(there)))):
            answer = worker.ask(**job)
            if job["do"] == "run":
                tally.add(kind, name_of(job), answer)
            for one in answer.get("found", ()):
                tally.add(kind, one["what"], one)
    assert not tally.said
    assert sum(tally.events.values()) >= 8
