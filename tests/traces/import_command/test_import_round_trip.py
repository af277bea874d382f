"""What `export --to measurements` writes comes back whole: fabrics, jobs, and how each row came to be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zerotune.store.errors import UserError
from zerotune.store.records import Algorithm, Collective, Outcome, Phase, Protocol, Source, TimingSource
from zerotune.store.sqlite.database import MEASUREMENT, UNKNOWN, Store
from zerotune.store.sqlite.rows.runnable import runnable
from zerotune.tuner.offline.export import export_measurements
from zerotune.tuner.offline.importing.command import import_measurements
from zerotune.tuner.traces import Trace
from zerotune.tuner.traces.left_out import LeftOut

UNSAID = {"fabric_id": None, "setting": None, "is_default": False, "n_nodes": None, "dry_run": False}
OWNERS = [("sweep-a", "boxes"), ("sweep-b", "boxes, altered"), ("sweep-a", "third")]


def rows_of(n_rows: int, seed: int = 0) -> np.ndarray:
    """Measurements that use every value the records allow."""
    draw = np.random.default_rng(seed)
    rows = np.zeros(n_rows, MEASUREMENT)
    rows["n_ranks"] = draw.integers(1, 64, n_rows)
    rows["n_nodes"] = draw.integers(1, rows["n_ranks"] + 1)
    rows["message_bytes"] = draw.integers(1, 2**40, n_rows)
    rows["duration_us"] = draw.random(n_rows) * 1e5
    rows["epoch"], rows["step"] = draw.integers(0, 2**32, n_rows), draw.integers(0, 2**32, n_rows)
    rows["memory_pressure"] = np.where(draw.random(n_rows) < 0.5, np.nan, draw.random(n_rows))
    kinds = {"collective": Collective, "phase": Phase, "source": Source, "outcome": Outcome}
    for name, kind in (kinds | {"timing_source": TimingSource, "algorithm": Algorithm, "protocol": Protocol}).items():
        rows[name] = draw.integers(0, len(kind), n_rows)
    silent = draw.random(n_rows) < 0.2
    rows["algorithm"][silent] = rows["protocol"][silent] = UNKNOWN
    rows["protocol"][draw.random(n_rows) < 0.1] = UNKNOWN
    rows["source"][~runnable(rows)] = Source.live  # of what was measured here it is known that it ran
    rows["n_channels"], rows["is_default"] = draw.integers(0, 65, n_rows), draw.integers(0, 2, n_rows)
    rows["chunk_bytes"] = draw.choice([0, 4096, 65536, 2**25], n_rows)
    return rows


def filled(path: Path, n_rows: int = 200) -> Path:
    with Store.open(path) as store:
        for seed, (job_id, fabric_id) in enumerate(OWNERS):
            store.record_job(job_id, fabric_id, {"emulated": "boxes"}, 4)
            store.record_measurements(fabric_id, job_id, rows_of(n_rows, seed))
    return path


def exported(store: Path, out: Path) -> Path:
    export_measurements(store, out)
    return out


def imported(path: Path, store: Path, **said: object) -> tuple[Trace, int]:
    return import_measurements(path, store, **(UNSAID | said))


def stored(path: Path) -> dict[tuple[str, str], bytes]:
    with Store.open(path, read_only=True) as store:
        return {one: store.measurements(*one[::-1], chunk_bytes=None).tobytes() for one in store.measured()}


def test_a_round_trip_loses_nothing(tmp_path: Path):
    first = filled(tmp_path / "first.db")
    table = exported(first, tmp_path / "all.csv")
    _, n_rows = imported(table, tmp_path / "second.db")
    assert n_rows == 600
    assert stored(first) == stored(tmp_path / "second.db")
    assert set(stored(first)) == set(OWNERS), "a job that ran on two fabrics has both"
    assert exported(tmp_path / "second.db", tmp_path / "again.csv").read_bytes() == table.read_bytes()


def test_untimed_calls_are_left_out_and_counted(tmp_path: Path):
    """Stored as 0 us it would be the fastest setting of all."""
    whole = exported(filled(tmp_path / "store.db"), tmp_path / "whole.csv").read_text()
    header, *lines = whole.splitlines()
    at, outcome_at = header.split(",").index("duration_us"), header.split(",").index("outcome")
    rows = [line.split(",") for line in lines]
    succeeded = [row for row in rows if row[outcome_at] == "ok"]
    for number, row in enumerate(succeeded[:10]):
        row[at] = "" if number % 2 else "0"
    path = tmp_path / "untimed.csv"
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n")
    trace, n_recorded = imported(path, tmp_path / "other.db")
    assert n_recorded == len(rows) - 10
    assert trace.summary.unusable[LeftOut.no_duration] == 10
    with Store.open(tmp_path / "other.db") as store:
        found = store.measurements()
        assert (found["duration_us"][found["outcome"] == Outcome.ok] > 0).all()


def test_nothing_is_counted_twice(tmp_path: Path):
    first = filled(tmp_path / "first.db")
    table = exported(first, tmp_path / "all.csv")
    before = stored(first)
    trace, n_rows = imported(table, first)
    assert n_rows == 0
    assert any("imported before" in note for note in trace.summary.notes)
    assert stored(first) == before
    with Store.open(first) as store:
        assert {job.n_ranks for job in store.jobs()} == {4}, "what was known of the job stays known"
        store.record_measurements("boxes", "sweep-a", rows_of(7, 9))
    exported(first, tmp_path / "later.csv")
    imported(table, tmp_path / "second.db")
    assert imported(tmp_path / "later.csv", tmp_path / "second.db")[1] == 7, "a later export adds what is new"
    assert stored(first) == stored(tmp_path / "second.db")


def test_options_fill_in_and_never_override(tmp_path: Path):
    first = filled(tmp_path / "first.db")
    table = exported(first, tmp_path / "all.csv")
    trace, _ = imported(table, tmp_path / "t.db", fabric_id="mine", is_default=True, n_nodes=1)
    assert stored(tmp_path / "t.db") == stored(first)
    for option in ("--fabric-id", "--default", "--nodes 1"):
        assert any(option in note for note in trace.summary.notes), option
    bare = tmp_path / "bare.csv"
    bare.write_text("collective,message_bytes,n_ranks,n_nodes,duration_us\nall_gather,1024,8,,10.5\n")
    with pytest.raises(UserError, match="--nodes"):
        imported(bare, tmp_path / "u.db")
    with pytest.raises(UserError, match=r"--default .*--setting"):
        imported(bare, tmp_path / "u.db", n_nodes=2)
    imported(bare, tmp_path / "u.db", n_nodes=2, is_default=True, fabric_id="mine")
    ((job_id, fabric_id),) = stored(tmp_path / "u.db")
    assert (job_id[:7], fabric_id) == ("import-", "mine")
