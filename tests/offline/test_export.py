"""Exports: our plan file, NVIDIA's CSV read back as its plugin reads it, measurements."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_material import FAST, make_store

from store.database import Store
from store.errors import PlanError, UserError
from store.plan_file import PlanFile, read_plan, write_plan
from store.records import (
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Decision,
    DecisionKey,
    Phase,
    Plan,
    PlanRow,
    Protocol,
    size_class_range,
)
from tuner.export import (
    export_measurements,
    export_nvidia_csv,
    export_plan,
    plan_of,
    read_nvidia_csv,
    without_phases,
    write_nvidia_csv,
)

TWO = CommunicatorClass(2, 2)


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store") / "store.db")


def decision(size_class: int, candidate: Candidate, kind: str = "promote") -> Decision:
    key = DecisionKey(TWO, Collective.all_gather, Phase.forward_gather, size_class)
    return Decision("j", "f", key, candidate, 1, kind, "why")


def as_nvidia_reads_it(text: str, collective: str, message_bytes: int, n_nodes: int, n_ranks: int) -> tuple | None:
    """The example plugin's search: first row that matches; None: no row, hence one channel."""
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        field = [part.strip() for part in line.split(",")]
        in_range = int(field[1]) <= message_bytes <= int(field[2])
        if (
            field[0] == collective
            and in_range
            and field[6] in ("-1", str(n_nodes))
            and field[7] in ("-1", str(n_ranks))
        ):
            return field[3], field[4], int(field[5])
    return None


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


def test_plan_file_round_trip(store_path: Path, tmp_path: Path):
    remarks = export_plan(store_path, tmp_path / "plan.json")
    file = read_plan(tmp_path / "plan.json")
    assert len(file.plan.rows) == 6
    assert {row.candidate for row in file.plan.rows} == {FAST}
    assert file.emulated == "ethernet_boxes"
    assert any("says nothing about real hardware" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "not a plan file"),
        (b"{}", "not a plan file"),
        (b'{"plan": {"epoch": 1, "rows": [{"candidate": {"algorithm": 99}}]}}', "not a plan file"),
        (b'{"zerotune_plan": 9, "rows": []}', "version 9"),
        (b"[" * 100_000, "not a plan file"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: bytes, told: str):
    (tmp_path / "p.json").write_bytes(text)
    with pytest.raises(PlanError, match=told):
        read_plan(tmp_path / "p.json")


def test_paths_that_cannot_be(tmp_path: Path, store_path: Path):
    with pytest.raises(PlanError, match="cannot read"):
        read_plan(tmp_path / "none")
    with pytest.raises(PlanError, match="cannot write"):
        write_plan(tmp_path / "no" / "p.json", PlanFile(Plan(1)))
    with pytest.raises(UserError, match="no job 'x'"):
        export_plan(store_path, tmp_path / "p.json", "x")
    with Store.open(tmp_path / "empty.db") as store:
        store.flush()
    with pytest.raises(UserError, match="no decisions"):
        export_plan(tmp_path / "empty.db", tmp_path / "p.json")


def test_nvidia_csv_is_read_as_it_was_meant(store_path: Path, tmp_path: Path):
    remarks = export_nvidia_csv(store_path, tmp_path / "t.conf")
    text = (tmp_path / "t.conf").read_text()
    assert "*nChannels = 1" in text, "the trap is named in the file"
    assert any("one channel" in remark for remark in remarks)
    assert all(len(line) < 256 for line in text.splitlines())
    assert as_nvidia_reads_it(text, "allgather", 16 << 10, 2, 2) == ("ring", "ll", 8)
    assert as_nvidia_reads_it(text, "allgather", 3 << 20, 2, 2) is None
    assert as_nvidia_reads_it(text, "allgather", 16 << 10, 1, 2) is None
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
    text = io.StringIO()
    write_nvidia_csv(kept, text)
    for row in kept:
        read = as_nvidia_reads_it(text.getvalue(), "allgather", row.min_bytes, 2, 2)
        assert read == ("ring", row.candidate.protocol.name, 4)


def test_conflicts_between_phases_are_counted():
    rows = [
        PlanRow(TWO, Collective.all_gather, Phase.forward_gather, 10, 20, FAST),
        PlanRow(
            TWO, Collective.all_gather, Phase.backward_gather, 15, 30, Candidate(Algorithm.ring, Protocol.simple, 2)
        ),
    ]
    kept, n_conflicts = without_phases(rows)
    assert n_conflicts == 1
    assert [(row.min_bytes, row.max_bytes) for row in kept] == [(10, 20), (21, 30)]


@pytest.mark.parametrize(
    "line",
    ["allgather,1,2", "nonsense,1,2,ring,ll,4,2,2", "allgather,x,2,ring,ll,4,2,2", "allgather,1,2,ring,ll,4,-1,2"],
)
def test_csv_rows_that_the_plugin_would_misread_are_refused(tmp_path: Path, line: str):
    (tmp_path / "t.conf").write_text(f"# head\n{line}\n")
    with pytest.raises(PlanError, match="line 2"):
        read_nvidia_csv(tmp_path / "t.conf")


def test_measurements_for_notebooks(store_path: Path, tmp_path: Path):
    (remark,) = export_measurements(store_path, tmp_path / "m.csv")
    with (tmp_path / "m.csv").open(newline="") as text:
        rows = list(csv.DictReader(text))
    assert f"{len(rows):,} measurements" in remark
    assert rows[0]["collective"] == "all_gather"
    assert rows[0]["algorithm"] == "ring"
    assert rows[0]["memory_pressure"] == ""
    assert float(rows[0]["duration_us"]) > 0
