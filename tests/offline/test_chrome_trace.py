"""Timelines in the Chrome Trace Event format: what viewers need of each event, one for each record."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_material import FAST, N_STEPS, PLACES, SIZES, make_store
from typer.testing import CliRunner

from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.records import Collective, CommunicatorClass, Decision, DecisionKey, Phase, StepRecord
from zerotune.store.sqlite.database import Store
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.cli.app import app
from zerotune.tuner.offline.chrome_trace import export_chrome_trace

N_CALLS = 40
CALL_US = 100.0
STEP_US = 1000.0
CALLS_PER_STEP = 4


def events_of(path: Path) -> list[dict[str, Any]]:
    """All events but metadata, after a check of all that the format asks for."""
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    events = document["traceEvents"]
    assert all(event.keys() >= {"ph", "ts", "pid", "tid", "name"} for event in events)
    described = {(event["name"], event["tid"]) for event in events if event["ph"] == "M"}
    shown = [event for event in events if event["ph"] != "M"]
    rows = defaultdict(list)
    for event in shown:
        assert ("process_name", event["pid"]) in described
        assert ("thread_name", event["tid"]) in described
        assert event["ts"] >= 0
        rows[event["pid"], event["tid"]].append(event)
        assert event["name"].isprintable()
        assert all(value is not None for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] > 0
        else:
            assert (event["ph"], event["s"]) == ("i", "t")
    assert len({tid for _, tid in rows}) == len(rows), "no two processes share a tid"
    for row in rows.values():
        assert [event["ts"] for event in row] == sorted(event["ts"] for event in row)
        spans = [event for event in row if event["ph"] == "X"]
        for one, following in itertools.pairwise(spans):
            assert one["ts"] + one["dur"] <= following["ts"] * (1 + 1e-15) + 1e-3, "none overlap in a row"
    return shown


def tracks_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Shown events by "process / track"."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    names = {(one["name"], one["tid"]): one["args"].get("name") for one in events if one["ph"] == "M"}
    found = defaultdict(list)
    for one in events_of(path):
        found[f"{names['process_name', one['pid']]} / {names['thread_name', one['tid']]}"].append(one)
    return found


def by_kind(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["cat"] == category]


def calls(clock_us: float = 0.0, waited_us: float = 0.0, *, comm_id: int = 7, first_us: float = 0.0) -> np.ndarray:
    """A decision and a timed record of each call; `clock_us` is how far this rank's clock is ahead."""
    block = np.zeros(2 * N_CALLS, OBSERVATION_FIELDS)
    number = np.repeat(np.arange(N_CALLS), 2)
    step, place = number // CALLS_PER_STEP, number % CALLS_PER_STEP
    begin_us = 1e6 + STEP_US * step + 20 + 2 * CALL_US * place + first_us - waited_us + clock_us
    block["start_ns"] = begin_us * 1e3
    block["step"], block["sequence"], block["comm_id"] = step + 1, number, comm_id
    block["n_ranks"], block["n_nodes"], block["message_bytes"] = 2, 1, 4 << 20
    block["collective"], block["phase"] = Collective.all_gather, Phase.forward_gather
    block["algorithm"], block["protocol"], block["n_channels"] = 1, 1, 16
    block["duration_us"] = np.where(np.arange(2 * N_CALLS) % 2, CALL_US + waited_us, -1)
    block["flags"] = np.where(np.arange(2 * N_CALLS) % 2, 3, 1)
    block["timing_source"], block["memory_pressure"] = 4, -1
    return block


def log(folder: Path, rank: int, *blocks: np.ndarray, job_id: str = "job-1", gap: int = 0) -> None:
    made = TraceLog(folder, job_id=job_id, rank=rank, n_ranks=2, fabric_id="f", fabric={}, version="0")
    for block in blocks:
        made.record(block)
    n_steps = N_CALLS // CALLS_PER_STEP
    made.steps([StepRecord(1 + step, step // 5, STEP_US, 12.5) for step in range(n_steps) if step != gap - 1])
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log(tmp_path / "traces", 0, calls())
    log(tmp_path / "traces", 1, calls(clock_us=5e9, waited_us=30))
    return tmp_path / "traces"


@pytest.fixture
def no_store(tmp_path: Path) -> Path:
    return tmp_path / "none.db"


def test_a_job_of_the_store(tmp_path: Path):
    store_path, out = make_store(tmp_path / "store.db"), tmp_path / "timeline.json"
    export_chrome_trace(store_path, out)
    events = events_of(out)
    with Store.open(store_path, read_only=True) as store:
        steps, decisions, rows = store.steps("job-1"), store.decisions("job-1"), store.measurements()
    spans, instants = by_kind(events, "step"), by_kind(events, "decision")
    assert [one["args"]["step"] for one in spans] == [one.step for one in steps] == list(range(N_STEPS))
    assert [one["dur"] for one in spans] == pytest.approx([one.duration_us for one in steps], abs=1e-2)
    assert sorted(one["args"]["reason"] for one in instants) == sorted(one.reason for one in decisions)
    collectives = by_kind(events, "collective")
    assert len(collectives) == len(rows) == N_STEPS * len(PLACES) * len(SIZES)
    assert sum(one["dur"] for one in collectives) == pytest.approx(rows["duration_us"].sum(), rel=1e-6)
    last = collectives[-1]
    assert last["name"] == "reduce_scatter 3 MiB ring/simple/8ch"
    assert last["args"]["asked_by"] == "NCCL"
    quick = next(one for one in reversed(collectives) if one["args"]["message_bytes"] == SIZES[0])
    assert (quick["name"], quick["args"]["asked_by"]) == (f"reduce_scatter 16 KiB {FAST}", "plan")
    begins = {one["args"]["step"]: one["ts"] for one in spans}
    assert all(one["ts"] >= begins[one["args"]["step"]] for one in collectives), "each within its step"


def test_every_rank_of_a_trace(folder: Path, tmp_path: Path, no_store: Path):
    export_chrome_trace(no_store, tmp_path / "t.json.gz", trace=folder)
    tracks = tracks_of(tmp_path / "t.json.gz")
    communicator = "communicator 7, 2 ranks on 1 node"
    assert list(tracks) == [f"rank {rank} / {name}" for rank in (0, 1) for name in ("steps", communicator)]
    ranks = [tracks[f"rank {rank} / {communicator}"] for rank in (0, 1)]
    for rank in ranks:
        assert len(rank) == N_CALLS
        assert {one["name"] for one in rank} == {"all_gather 4 MiB ring/ll128/16ch"}
    expected = {
        "step": 1, "epoch": 0, "phase": "forward_gather", "message_bytes": 4 << 20, "n_ranks": 2, "n_nodes": 1,
        "setting_that_ran": "ring/ll128/16ch", "asked_by": "plan", "timing_source": "emulated", "sequence": 0,
    }  # fmt: skip
    assert ranks[0][0]["args"] == expected
    ends = [[one["ts"] + one["dur"] for one in rank] for rank in ranks]
    assert ends[0] == pytest.approx(ends[1], abs=0.01), "clocks 5,000 s apart show one time"
    for rank in (0, 1):
        steps = tracks[f"rank {rank} / steps"]
        assert [one["args"]["step"] for one in steps] == list(range(1, 1 + N_CALLS // CALLS_PER_STEP))
        assert {one["dur"] for one in steps} == {STEP_US}
        for one in ranks[rank]:
            (own,) = (step for step in steps if step["args"]["step"] == one["args"]["step"])
            assert own["ts"] <= one["ts"] < own["ts"] + own["dur"]


def test_decisions_of_the_store_stand_in_the_trace(folder: Path, tmp_path: Path):
    key = DecisionKey(CommunicatorClass(2, 1), Collective.all_gather, Phase.forward_gather, 88)
    steps = {"known": 3, "late": 99, "old": None}
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("job-1", "f", {}, 2, name="mine")
        store.record_decisions(
            [Decision("job-1", "f", key, FAST, 1, "promote", reason, step=step) for reason, step in steps.items()]
            + [Decision("job-1", "f", key, FAST, 1, "pace", "slow\x1b[31m\u202e", step=1)]
        )
        store.flush()
    export_chrome_trace(tmp_path / "s.db", tmp_path / "t.json", "mine", folder)
    found = by_kind(events_of(tmp_path / "t.json"), "decision")
    first_us = tracks_of(tmp_path / "t.json")["rank 0 / steps"][0]["ts"]
    assert {one["args"]["reason"]: (one["ts"] - first_us) / STEP_US for one in found} == {
        "slow\\u001b[31m\\u202e": 1, "known": 3, "old": 5, "late": 10,
    }  # fmt: skip
    assert found[0]["name"] == "pace"
    assert found[1]["name"] == f"promote all_gather 4 MiB to 4.757 MiB {FAST}"


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    return done.exit_code, done.output + str(done.exception or "")


def test_the_command(folder: Path, tmp_path: Path):
    store = make_store(tmp_path / "s.db")
    out = tmp_path / "t.json.gz"
    code, told = run("store", "export", out, "--to", "chrome", "--store", store, "--json")
    assert (code, json.loads(told)["format"]) == (0, "chrome")
    assert by_kind(events_of(out), "collective")
    assert run("store", "export", out, "--to", "chrome", "--store", store, "--trace", folder)[0] == 0
    assert len(by_kind(events_of(out), "collective")) == 2 * N_CALLS
