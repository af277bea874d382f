"""Exports: our plan file, NVIDIA's CSV read back as its plugin reads it, measurements."""

from __future__ import annotations

import csv
import sys
from functools import partial
from pathlib import Path

import numpy as np
import nvidia_reader
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_material import FAST, N_STEPS, make_store

from zerotune.store.errors import PlanError, UserError
from zerotune.store.plan_file import read_plan
from zerotune.store.records import (
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Phase,
    PlanRow,
    Protocol,
    StepRecord,
    size_class_range,
)
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.offline.export import check_suffix, export_measurements, export_plan, export_table, plan_of
from zerotune.tuner.offline.tuner_tables import table_text, without_phases
from zerotune.tuner.offline.tuner_tables_reading import read_nvidia_csv

nvidia_csv = partial(export_table, "nvidia-csv")
TWO = CommunicatorClass(2, 2)


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store") / "store.db")


def decision(
    size_class: int, candidate: Candidate, kind: str = "promote", reason: str = "why", epoch: int = 1
) -> Decision:
    key = DecisionKey(TWO, Collective.all_gather, Phase.forward_gather, size_class)
    return Decision("j", "f", key, candidate, epoch, kind, reason)


def exported(tmp_path: Path, *decisions: Decision, highest_epoch: int = 9) -> tuple[tuple[PlanRow, ...], str]:
    """The rows of the plan file that a job with these decisions leaves, and what is said of it."""
    with Store.open(tmp_path / "own.db") as store:
        store.record_job("j", "f", {}, 2)
        store.record_steps("j", [StepRecord(1, highest_epoch, 1000.0)])
        store.record_decisions(decisions)
        store.flush()
    remarks = export_plan(tmp_path / "own.db", tmp_path / "plan.json")
    return read_plan(tmp_path / "plan.json").plan.rows, " ".join(remarks)


def test_neighbouring_size_classes_become_one_row():
    other = Candidate(Algorithm.ring, Protocol.simple, 2)
    plan = plan_of([decision(80, FAST), decision(81, FAST), decision(82, other), decision(84, FAST, "explore")])
    assert [(row.min_bytes, row.max_bytes, row.candidate) for row in plan.rows] == [
        (size_class_range(80)[0], size_class_range(81)[1], FAST),
        (*size_class_range(82), other),
    ]


def test_the_last_decision_counts_and_baseline_needs_no_row():
    plan = plan_of([decision(80, FAST), decision(80, Candidate(), "rollback")])
    assert plan.rows == ()


OTHER = Candidate(Algorithm.ring, Protocol.simple, 2)


@pytest.mark.parametrize(
    ("words", "proven", "n_leads"),
    [
        ([("provisional", FAST)], [], 1),
        ([("provisional", FAST), ("keep", FAST)], [], 1),
        ([("promote", OTHER), ("provisional", FAST), ("rollback", FAST)], [OTHER], 1),
        ([("promote", OTHER), ("provisional", FAST), ("keep", OTHER)], [OTHER], 0),
        ([("provisional", FAST), ("promote", FAST), ("keep", FAST)], [FAST], 0),
        ([("provisional", FAST), ("keep", Candidate())], [], 0),
    ],
)
def test_leads_are_left_out_and_told(tmp_path: Path, words, proven, n_leads):
    rows, said = exported(tmp_path, *(decision(80, candidate, kind) for kind, candidate in words))
    assert [row.candidate for row in rows] == proven
    assert ("`zerotune explain`" in said) == bool(n_leads)


def test_plan_file_round_trip(store_path: Path, tmp_path: Path):
    remarks = export_plan(store_path, tmp_path / "plan.json")
    file = read_plan(tmp_path / "plan.json")
    assert len(file.plan.rows) == 6
    assert {row.candidate for row in file.plan.rows} == {FAST}
    assert file.emulated == "ethernet_boxes"
    assert any("real hardware" in remark for remark in remarks)


def test_settings_that_no_step_ran_under_are_left_out_and_told(store_path: Path, tmp_path: Path):
    path = make_store(tmp_path / "s.db", "short", n_untuned=N_STEPS)
    remarks = export_plan(path, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").plan.rows == ()
    assert any(remark.startswith("Left out: 6 ") and " short" in remark for remark in remarks)
    assert any("Left out" in remark for remark in nvidia_csv(path, tmp_path / "t.conf"))
    assert not any("Left out" in remark for remark in export_plan(store_path, tmp_path / "plan.json"))


def test_without_a_name_the_newest_job_that_adopted_a_plan_is_exported(tmp_path: Path):
    make_store(tmp_path / "s.db", "tuned")
    make_store(tmp_path / "s.db", "short", n_untuned=N_STEPS)
    export_plan(tmp_path / "s.db", tmp_path / "plan.json")
    file = read_plan(tmp_path / "plan.json")
    assert (file.job_id, len(file.plan.rows)) == ("tuned", 6)
    for export, name in ((export_plan, "plan.json"), (nvidia_csv, "t.conf")):
        remarks = export(tmp_path / "s.db", tmp_path / name)
        assert any(": 1 newer job" in one and "--job" in one for one in remarks)
    assert not any("--job" in one for one in export_plan(tmp_path / "s.db", tmp_path / "plan.json", "tuned"))


def test_a_job_that_leaves_nothing_is_refused_by_its_name(store_path: Path, tmp_path: Path):
    with pytest.raises(UserError, match="job j "):
        exported(tmp_path, decision(80, FAST, "explore"))
    with pytest.raises(UserError, match="job j "):
        exported(tmp_path, decision(80, FAST, "promote"), highest_epoch=0)
    make_store(tmp_path / "s.db", "tuned")
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("idle", "f", {}, 2)
        store.flush()
    with pytest.raises(UserError, match=r"job idle;.* tuned"):
        export_plan(tmp_path / "s.db", tmp_path / "plan.json", "idle")


def test_nvidia_csv_is_read_as_it_was_meant(store_path: Path, tmp_path: Path):
    remarks = nvidia_csv(store_path, tmp_path / "t.conf")
    text = (tmp_path / "t.conf").read_text()
    assert "*nChannels = 1" in text, "the trap is named in the file"
    assert any("one channel" in remark for remark in remarks)
    assert all(len(line) < 256 for line in text.splitlines())
    rows = nvidia_reader.load(text)
    assert len(rows) == len([line for line in text.splitlines() if not line.startswith("#")])
    assert nvidia_reader.ask(rows, "allgather", 16 << 10, 2, 2) == ("ring", "ll", 8)
    one_channel = (None, None, 1)
    assert nvidia_reader.ask(rows, "allgather", 3 << 20, 2, 2) == one_channel, "the trap that the remarks tell of"
    assert nvidia_reader.ask(rows, "allgather", 16 << 10, 1, 2) == one_channel
    assert {row.candidate for row in read_nvidia_csv(tmp_path / "t.conf")} == {FAST}


ranges = st.tuples(st.integers(0, 1000), st.integers(0, 300))


@given(st.lists(st.tuples(ranges, st.sampled_from(Phase), st.sampled_from(Protocol)), max_size=12))
def test_without_phases_never_overlaps_and_covers_the_same(rows: list):
    plan_rows = [
        PlanRow(TWO, Collective.all_gather, phase, low, low + width, Candidate(Algorithm.ring, protocol, 4))
        for (low, width), phase, protocol in rows
    ]
    kept, _ = without_phases(plan_rows)
    covered = [size for row in kept for size in range(row.min_bytes, row.max_bytes + 1)]
    assert len(covered) == len(set(covered))
    assert set(covered) == {size for row in plan_rows for size in range(row.min_bytes, row.max_bytes + 1)}
    loaded = nvidia_reader.load(table_text("nvidia-csv", kept))
    for row in kept:
        for size in (row.min_bytes, row.max_bytes):
            read = nvidia_reader.ask(loaded, "allgather", size, 2, 2)
            assert read == ("ring", row.candidate.protocol.name, 4)


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("protocol", Protocol)
def test_every_name_is_one_that_the_plugin_knows(algorithm: Algorithm, protocol: Protocol):
    """It takes ring, simple and all_reduce for any name it does not know, and -1 channels for one."""
    for collective in (Collective.all_gather, Collective.reduce_scatter, Collective.broadcast, Collective.reduce):
        row = PlanRow(TWO, collective, Phase.other, 1, 2**40, Candidate(algorithm, protocol))
        asked = collective.name.replace("_", "")
        read = nvidia_reader.ask(nvidia_reader.load(table_text("nvidia-csv", [row])), asked, 1 << 20, 2, 2)
        assert read == (algorithm.name, protocol.name, 0), "0: NCCL's own channel count"


@pytest.mark.parametrize(
    "line",
    [
        *("allgather,1,2", "nonsense,1,2,ring,ll,4,2,2", "allgather,x,2,ring,ll,4,2,2", "allgather,1,2,ring,ll,4,-1,2"),
        "allgather,9,8,ring,ll,4,2,2",
    ],
)
def test_csv_rows_that_the_plugin_would_misread_are_refused(tmp_path: Path, line: str):
    (tmp_path / "t.conf").write_text(f"# head\n{line}\n")
    with pytest.raises(PlanError, match="line 2"):
        read_nvidia_csv(tmp_path / "t.conf")


def test_measurements_as_parquet(store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs pyarrow.*zerotune\[parquet\]"):
        export_measurements(store_path, tmp_path / "m.parquet")
    monkeypatch.undo()
    parquet = pytest.importorskip("pyarrow.parquet")
    export_measurements(store_path, tmp_path / "m.parquet")
    export_measurements(store_path, tmp_path / "m.csv")
    rows = parquet.read_table(tmp_path / "m.parquet").to_pylist()
    with (tmp_path / "m.csv").open(newline="") as text:
        for row, line in zip(rows, csv.DictReader(text), strict=True):
            assert {name: "" if value is None else str(value) for name, value in row.items()} == line
    with pytest.raises(UserError, match="cannot write"):
        export_measurements(store_path, tmp_path / "no" / "m.parquet")


@pytest.mark.parametrize(
    ("to", "name", "remedy"),
    [
        ("measurements", "m.xls", ".csv or .parquet"),
        ("measurements", "m.json", ".csv or .parquet"),
        ("measurements", "m.csv.gz", ".csv or .parquet"),
        ("plan", "plan.parquet", ".json"),
        ("plan", "plan.csv", ".json"),
        ("nvidia-csv", "tuner.json", ".csv"),
        ("chrome", "timeline.txt", ".json or .gz"),
        ("chrome", "timeline.csv", ".json or .gz"),
    ],
)
def test_a_name_that_promises_another_format_is_refused(to: str, name: str, remedy: str):
    with pytest.raises(UserError, match=rf"\{Path(name).suffix};.* {remedy}"):
        check_suffix(Path(name), to)


def named(folder: Path, job_id: str, fabric_id: str = "fabric") -> Path:
    """The table of a job with one measurement."""
    block = np.zeros(1, MEASUREMENT)
    block["message_bytes"], block["duration_us"], block["n_ranks"], block["n_nodes"] = 1 << 20, 100.0, 2, 1
    block["collective"], block["algorithm"], block["protocol"] = Collective.all_gather, 1, 2
    with Store.open(folder / "s.db") as store:
        store.record_job(job_id, fabric_id, {}, 2)
        store.record_measurements(fabric_id, job_id, block)
    export_measurements(folder / "s.db", folder / "m.csv")
    return folder / "m.csv"


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d"])
def test_names_are_no_formulas_to_a_spreadsheet(tmp_path: Path, first: str):
    with named(tmp_path, f"{first}1+1", f"{first}2").open(newline="") as text:
        (row,) = csv.DictReader(text)
    assert (row["job_id"], row["fabric_id"]) == (f"'{first}1+1", f"'{first}2")
    assert float(row["duration_us"]) == 100.0


@pytest.mark.parametrize("separator", [";", "\t", "|", ","])
def test_names_are_no_formulas_behind_what_else_may_separate_cells(tmp_path: Path, separator: str):
    with named(tmp_path, f"x{separator}=HYPERLINK(1)").open(newline="") as text:
        cells = [cell.strip('" ') for line in csv.reader(text, delimiter=separator) for cell in line]
    assert any("HYPERLINK" in cell for cell in cells)
    assert not any(cell.startswith("=") for cell in cells)


def test_nothing_to_export_is_no_success(tmp_path: Path, store_path: Path):
    with Store.open(tmp_path / "s.db") as store:
        store.record_job("idle", "f", {}, 2)
        store.flush()
    for job_id, told in (("idle", "'idle'"), (None, "no measurements")):
        with pytest.raises(UserError, match=told):
            export_measurements(tmp_path / "s.db", tmp_path / "m.csv", job_id)
    assert not (tmp_path / "m.csv").exists()
    (remark,) = export_measurements(store_path, tmp_path / "m")
    assert remark.endswith("as CSV."), "without a suffix it says which format it took"
