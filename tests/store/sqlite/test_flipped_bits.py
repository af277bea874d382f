"""Any one bit of a store is flipped: nothing is read that was not written, and nothing is missing that is not told."""

from __future__ import annotations

import logging
import random
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from zerotune.store.errors import StoreError
from zerotune.store.records import (
    BASELINE,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Phase,
    Stage,
    StepRecord,
)
from zerotune.store.sqlite.database import Store

PAGE_BYTES = 4096
JOBS = {"job1": "fabric1", "job2": "fabric2"}
TABLES = ("fabrics", "jobs", "series")
SMALL = (*TABLES, *(f"sqlite_autoindex_{table}_1" for table in TABLES))
KEY = DecisionKey(CommunicatorClass(8, 1), Collective.all_gather, Phase.other, 80)
N_OF_EACH, N_ANYWHERE = 4, 16


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, block) -> Path:
    path = tmp_path_factory.mktemp("written") / "store.db"
    with Store.open(path) as store:
        for job, fabric in JOBS.items():
            store.record_job(job, fabric, {"gpu": "H100", "n_gpus": 8, "bus_gbs": 450.5}, 8, f"named {job}")
            store.record_measurements(fabric, job, block(400, message_bytes=1 << np.arange(400) % 20, step=range(400)))
            store.record_steps(job, [StepRecord(step, 1, 100.5 + step, 10.25, 0.5) for step in range(100)])
            for at in range(20):
                store.record_decisions([Decision(job, fabric, KEY, BASELINE, at, "keep", "so", 1.5, 1.0, 2.0, step=at)])
            store.update_job(job, stage=Stage.zero3, ended_at_s=2e9)
    return path


def everything(store: Store) -> Counter[Any]:
    """All that readers see, piece by piece, with what it belongs to."""
    found: Counter[Any] = Counter()
    for job, fabric in JOBS.items():
        found.update((job, fabric, row.tobytes()) for row in store.measurements(fabric, job))
        found.update((job, step) for step in store.steps(job))
        found.update((job, decision) for decision in store.decisions(job, fabric))
    # What stands in for a lost one says nothing but a name; the fabric of a job may be lost alone.
    found.update(repr(msgspec.structs.replace(job, fabric_id="")) for job in store.jobs() if job.started_at_s)
    found.update((name, repr(facts)) for name, facts in store.fabrics().items() if facts)
    return found


def places(path: Path) -> list[int]:
    """Bits to flip: of what the small tables hold and their indexes, and anywhere."""
    chance, content = random.Random(1), path.read_bytes()
    with closing(sqlite3.connect(path)) as connection:
        roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage > 0"))
    chosen = [chance.randrange(8 * len(content)) for _ in range(N_ANYWHERE)]
    for name in SMALL:
        page = (roots[name] - 1) * PAGE_BYTES
        used = page + int.from_bytes(content[page + 5 : page + 7], "big")
        chosen += [chance.randrange(8 * used, 8 * (page + PAGE_BYTES)) for _ in range(N_OF_EACH)]
    return chosen


def flipped(written: Path, folder: Path, bit: int) -> Path:
    path = Path(shutil.copy(written, folder / f"{bit}.db"))
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return path


def test_nothing_false_is_read_and_nothing_goes_missing_in_silence(written: Path, tmp_path: Path, caplog):
    with Store.open(written, read_only=True) as store:
        expected = everything(store)
    n_noticed = 0
    for bit in places(written):
        caplog.clear()
        path = flipped(written, tmp_path, bit)
        try:
            with Store.open(path) as store:
                found = everything(store)
        except StoreError:
            n_noticed += 1
            continue
        is_told = any(one.levelno >= logging.WARNING for one in caplog.records)
        n_noticed += is_told
        assert not found - expected, f"byte {bit // 8}: read, and never written"
        assert is_told or not expected - found, f"byte {bit // 8}: missing, and nobody was told"
    assert n_noticed > N_OF_EACH * len(SMALL) // 2


@pytest.mark.parametrize(
    ("table", "column", "value", "is_read"),
    [
        ("series", "n_channels", "n_channels + 1", ("jobs", "fabrics")),
        ("jobs", "n_ranks", "n_ranks + 1", ("fabrics",)),
        ("jobs", "ended_at_s", "ended_at_s + 1", ("fabrics",)),
        ("fabrics", "description", "replace(description, 'H100', 'H200')", ("jobs",)),
    ],
)
def test_possible_values_that_were_not_written_are_told_and_not_read(
    written: Path, tmp_path: Path, caplog, table: str, column: str, value: str, is_read: tuple[str, ...]
):
    path = Path(shutil.copy(written, tmp_path / f"{column}.db"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {column} = {value} WHERE id = 1")
    for _ in range(2):
        with Store.open(path) as store:
            assert store.set_aside is None
            assert len(store.jobs()) == 2 - ("jobs" not in is_read)
            assert sum(map(bool, store.fabrics().values())) == 2 - ("fabrics" not in is_read)
            assert (len(store.measurements()) == 800) == (table != "series")
    assert f"1 of {table}" in caplog.text


def test_what_a_job_becomes_later_is_as_sound_as_what_it_was(written: Path, tmp_path: Path):
    path = Path(shutil.copy(written, tmp_path / "later.db"))
    with Store.open(path) as store:
        store.record_job("job1", "fabric1", {"gpu": "H200"}, 16)
        store.record_job("job3", "fabric3", {}, 4)
        store.record_steps("job4", [StepRecord(1, 1, 1.0)])
    for _ in range(2):  # jobs that had not ended are lost by then
        with Store.open(path) as store:
            assert store.flush()
            assert [(job.job_id, job.n_ranks, job.is_lost) for job in store.jobs()] == [
                ("job1", 16, True), ("job2", 8, False), ("job3", 4, True), ("job4", 0, False),
            ]  # fmt: skip
            assert store.fabrics()["fabric1"] == {"gpu": "H200"}
            store.update_job("job2", failure="rank 1: ValueError")
            store.flush()
            assert store.jobs()[1].failure == "rank 1: ValueError"
