"""Summaries of collectives as CSV, headers in comments, and what is said of tables with other columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import trace_samples as samples
from import_runs import command

from zerotune.store.records import Algorithm, Collective
from zerotune.tuner.traces import read_trace

SHORT = "collective,size_b,time_us,n_gpus,nodes,algbw,busbw\nall_reduce,4096,33.5,16,2,0.12,0.23\n"
TUNER_ROW = "allgather,16,1048576,ring,ll128,8,2,1,100.5\n"


def test_summaries_of_trace_lens_are_measurements_where_somebody_says_what_ran(tmp_path: Path) -> None:
    trace = read_trace(samples.written(tmp_path, "summary_csv"))
    assert [(one.collective, one.message_bytes, one.n_ranks, one.duration_us) for one in trace.observations()] == [
        (Collective.all_gather, 8 * 2 << 20, 8, 210.5),
        (Collective.reduce_scatter, 32 << 20, 8, 305.0),
    ]
    assert list(trace.measurements()) == []
    (rows,) = trace.measurements(is_default=True, n_nodes=1)
    assert rows["is_default"].all()
    assert trace.summary.notes, "rows are means"


def test_other_summaries_by_their_columns(tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    path.write_text(SHORT)
    (one,) = read_trace(path).observations()
    assert (one.collective, one.message_bytes, one.duration_us) == (Collective.all_reduce, 4096, 33.5)
    assert (one.n_ranks, one.n_nodes, one.algorithm) == (16, 2, None)


def test_a_table_with_other_columns_names_them(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "summary.csv"
    path.write_text("what,how much,algbw,busbw,seconds\nall_reduce,4K,0.1,0.2,0.5\n")
    code, out, err = command(monkeypatch, capsys, path, "--store", tmp_path / "s.db")
    assert (code, out, err.count("\n")) == (2, "", 1)
    for name in ("how much", "seconds", "size", "count", "type", "time"):
        assert name in err


@pytest.mark.parametrize(
    "header",
    [
        "# collective,ranks,size_bytes,algorithm,protocol,channels,nodes,pipeOps,latency_us",
        "# Format: collective,ranks,size_bytes,algorithm,protocol,channels,nodes,pipeOps,latency_us",
        "# collective, ranks, size_bytes (total), algorithm, protocol, channels, nodes, pipeOps, latency_us (median)",
    ],
)
def test_a_header_in_a_comment_is_a_header(tmp_path: Path, header: str) -> None:
    path = tmp_path / "tuner.csv"
    path.write_text(f"# measured here; rules with collective_type,min_bytes are elsewhere\n{header}\n{TUNER_ROW}")
    (one,) = read_trace(path).observations()
    assert (one.algorithm, one.message_bytes, one.n_ranks, one.n_nodes) == (Algorithm.ring, 1 << 20, 16, 2)
    assert one.duration_us == 100.5
