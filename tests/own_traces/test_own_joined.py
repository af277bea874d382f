"""Our own traces in the store: one row per collective, as the daemon would have recorded it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.errors import TraceError
from zerotune.store.sqlite.database import Store
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.offline.importing.command import import_measurements
from zerotune.tuner.offline.importing.messages import left_out
from zerotune.tuner.offline.replay.reading import load_table
from zerotune.tuner.traces import Trace
from zerotune.tuner.traces.left_out import LeftOut

MATCHED, TIMED = 1, 2
N_CALLS = 500
FABRIC = {"emulated": "boxes", "title": "two boxes"}


def calls(rank: int, n_calls: int = N_CALLS, comm_id: int = 7, seed: int = 0) -> np.ndarray:
    """Decisions and timed collectives of one rank; one rank of the four is last, and waits for nobody."""
    draw = np.random.default_rng(seed)
    last = draw.integers(0, 4, n_calls)
    alone_us = 50 + draw.random(n_calls) * 100
    waited_us = np.where(last == rank, 0, 10 + 500 * np.random.default_rng(rank).random(n_calls))
    block = np.zeros(2 * n_calls, OBSERVATION_FIELDS)
    block["comm_id"], block["n_ranks"], block["n_nodes"], block["rank"] = comm_id, 4, 2, rank
    block["message_bytes"], block["collective"] = 1 << 20, np.repeat(draw.integers(2, 5, n_calls), 2)
    block["algorithm"], block["protocol"], block["n_channels"] = 1, 2, 4
    block["sequence"] = np.arange(2 * n_calls)
    begin_ns = 10**6 * np.arange(n_calls) + 10**9 * (1 + rank)  # each rank has a clock of its own
    block["start_ns"] = np.repeat(begin_ns - (waited_us * 1e3).astype(int), 2)
    block["flags"] = np.repeat(draw.integers(0, 2, n_calls), 2) * MATCHED
    block["flags"][1::2] |= TIMED
    block["duration_us"] = -1
    block["duration_us"][1::2] = alone_us + waited_us
    block["timing_source"], block["memory_pressure"] = 4, -1
    return block


def log(folder: Path, rank: int, *blocks: np.ndarray, job_id: str = "job-1", fabric_id: str = "boxes-1") -> Path:
    made = TraceLog(folder, job_id=job_id, rank=rank, n_ranks=4, fabric_id=fabric_id, fabric=FABRIC, version="0")
    for block in blocks:
        made.record(block)
        made.flush()
    made.close()
    assert made.path is not None
    return made.path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in range(4):
        log(tmp_path / "traces", rank, *np.array_split(calls(rank), 5))
    return tmp_path / "traces"


def imported(path: Path, store: Path, **said: object) -> tuple[Trace, int]:
    unsaid = {"fabric_id": None, "setting": None, "is_default": False, "n_nodes": None, "dry_run": False}
    return import_measurements(path, store, **(unsaid | said))


def rows_in(store: Path, **which: str) -> np.ndarray:
    with Store.open(store, read_only=True) as opened:
        return opened.measurements(**which)


def test_ranks_are_joined_as_replay_joins_them(folder: Path, tmp_path: Path):
    trace, n_rows = imported(folder, tmp_path / "s.db")
    rows, table = rows_in(tmp_path / "s.db"), load_table(folder)
    assert n_rows == len(rows) == len(table.rows) == N_CALLS
    assert np.sort(rows["duration_us"]) == pytest.approx(np.sort(table.duration_us))
    assert rows["duration_us"].max() < 151, "no waiting for others in it"
    assert rows["is_default"].sum() == table.is_default.sum() > 0
    assert trace.summary.n_joined == 4 * N_CALLS
    assert left_out(trace) == {LeftOut.decision: 4 * N_CALLS}


def test_job_and_fabric_are_the_traces_own(folder: Path, tmp_path: Path):
    trace, _ = imported(folder, tmp_path / "s.db", fabric_id="mine", is_default=True, n_nodes=1)
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        assert store.measured() == {("job-1", "boxes-1"): N_CALLS}
        assert store.fabrics() == {"boxes-1": FABRIC}
        (job,) = store.jobs()
    assert (job.n_ranks, job.ended_at_s is not None) == (4, True)
    assert set(rows_in(tmp_path / "s.db")["is_default"]) == {0, 1}, "--default makes nothing NCCL's own choice"
    for option in ("--fabric-id", "--default", "--nodes 1"):
        assert any(option in note for note in trace.summary.notes), option


def test_restarted_ranks_and_other_jobs_are_not_joined_with_the_first(tmp_path: Path):
    """A restarted job counts its collectives anew, in communicators of the same ids."""
    for rank in range(4):
        log(tmp_path / "traces", rank, calls(rank))
        log(tmp_path / "traces", rank, calls(rank, 100, seed=5))
        log(tmp_path / "traces", rank, calls(rank, 50, seed=6), job_id="job-2", fabric_id="boxes-2")
    imported(tmp_path / "traces", tmp_path / "s.db")
    with Store.open(tmp_path / "s.db", read_only=True) as store:
        assert store.measured() == {("job-1", "boxes-1"): N_CALLS + 100, ("job-2", "boxes-2"): 50}
    assert rows_in(tmp_path / "s.db")["duration_us"].max() < 151


def test_a_job_that_the_daemon_recorded_is_not_counted_twice(folder: Path, tmp_path: Path):
    imported(folder, tmp_path / "s.db")
    _, n_rows = imported(folder, tmp_path / "s.db")
    assert (n_rows, len(rows_in(tmp_path / "s.db"))) == (0, N_CALLS)


def flip_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 40] = bytes(40)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["empty", "random", "flipped"])
def test_replay_uses_the_other_ranks_of_a_damaged_one(folder: Path, damage: str) -> None:
    broken = sorted(folder.iterdir())[1]
    if damage == "flipped":
        flip_middle(broken)
    else:
        broken.write_bytes(b"" if damage == "empty" else bytes(range(256)) * 9)
    table = load_table(folder)
    assert len(table.rows) == N_CALLS
    assert table.n_files == 3
    assert table.notes[0].startswith("Left out 1 of 4 files: ")
    assert str(broken) in table.notes[0]


def test_replay_refuses_a_trace_of_which_every_rank_is_damaged(folder: Path) -> None:
    for one in folder.iterdir():
        flip_middle(one)
    with pytest.raises(TraceError, match=str(folder)):
        load_table(folder)
