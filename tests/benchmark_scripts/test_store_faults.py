"""A handful of the faults and power cuts that `python -m benchmarks store_faults` makes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service.power_cut import CREATE, RENAME, SYNC, SYNC_FOLDER, WRITE, Change, Disk, Left
from benchmarks.service.store_faults import (
    SCENARIOS,
    Tally,
    Worker,
    build,
    gathered,
    jobs_of,
    name_of,
    scratch_folder,
)

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
def test_what_was_acknowledged_is_there(worker: Worker, jobs: list[dict[str, Any]], scenario: str) -> None:
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


def test_a_store_that_loses_what_it_acknowledged_is_found_out(worker: Worker, jobs: list[dict[str, Any]]) -> None:
    job = next(job for job in jobs if job["do"] == "run" and job["scenario"] == "resume")
    answer = worker.ask(**{**job, "rows": [*job["rows"], 10**6]})
    assert answer["lost"] == 1


def test_names_are_kept_in_order_and_what_is_synced_is_there(tmp_path: Path) -> None:
    def change(what: int, inode: int = 0, offset: int = 0, name: str = "", data: bytes = b"") -> Change:
        return Change(what, inode, offset, name, data)

    disk = Disk({1: ("/a", b"old")})
    disk.apply(change(CREATE, 2, name="/b"))
    disk.apply(change(WRITE, 2, data=b"x" * 2000))
    assert disk.after_a_cut(Left.nothing, 0) == {"/a": b"old"}
    assert disk.after_a_cut(Left.everything, 0) == {"/a": b"old", "/b": b"x" * 2000}
    assert len(disk.after_a_cut(Left.torn, 0)["/b"]) == 1024
    disk.apply(change(SYNC, 2))
    disk.apply(change(RENAME, name="/b\n/a"))
    assert {disk.after_a_cut(Left.some_sectors, seed).get("/a") for seed in range(20)} == {b"old", b"x" * 2000}
    disk.apply(change(SYNC_FOLDER))
    assert all(disk.after_a_cut(left, 0) == {"/a": b"x" * 2000} for left in Left)
