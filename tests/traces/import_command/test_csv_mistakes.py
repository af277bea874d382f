"""CSV as people have it: quoted, or nearly right; each mistake is told with its file, line, value and remedy."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import trace_samples as samples
from import_runs import HEADER, ROWS, command

from zerotune.store.errors import TraceError
from zerotune.store.records import Collective
from zerotune.tuner.traces import csv_rows, read_trace
from zerotune.tuner.traces.left_out import LeftOut

ROW = ROWS.format(4096, 20)
OWN = "n_ranks,n_nodes,message_bytes,duration_us,collective,algorithm,protocol\n8,1,4096,1.5,all_gather,ring,ll\n"


def rows_in(path: Path) -> np.ndarray:
    return np.concatenate(list(read_trace(path).measurements()))


def quoted(text: str) -> str:
    """RFC 4180: every cell in quotes, a comma, quotes and a line break in one that nobody reads."""
    rows = list(csv.reader(io.StringIO(text)))
    out = io.StringIO()
    write = csv.writer(out, quoting=csv.QUOTE_ALL).writerows
    write([[*rows[0], "remark"], *([*row, 'slow, "as ever"\nand more'] for row in rows[1:])])
    return out.getvalue()


def test_a_quoted_line_break_may_stand_where_the_file_is_cut_into_pieces(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("zerotune.tuner.traces.files.CHUNK_BYTES", 150)
    text = HEADER + "".join(ROWS.format(4096 * at, 20 + at) for at in range(1, 40))
    path = tmp_path / "quoted.csv"
    path.write_text(quoted(text + ROW.replace("ring", "rnig")), newline="")
    trace = read_trace(path)
    assert sum(map(len, trace.measurements())) == 39
    (example,) = trace.summary.examples[LeftOut.unknown_name]
    assert example == "algorithm 'rnig' in line 80 of quoted.csv", "each row has two lines, the header one"


def test_a_quote_that_is_never_closed_is_told_by_its_line(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(csv_rows, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "t.csv"
    path.write_text('# a comment may say 5" of it\n' + HEADER + ROW + ROW.replace("ring", '"ring') + ROW * 30_000)
    with pytest.raises(TraceError, match=r"t\.csv, line 4:"):
        rows_in(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "collective,algorithm,protocol,latency_us\nallgather,ring,ll,5\n",
            "size_bytes (line 1: 'collective,algorithm,protocol,latency_us')",
        ),
        (OWN.replace("n_nodes,", ""), "n_nodes (line 1: 'n_ranks,message_bytes,"),
        ((HEADER + ROW).replace(",", ";"), "semicolons (line 1: 'collective;size_bytes;"),
        ("# ours\n" + HEADER.replace(",", "\t"), r"tabs (line 2: 'collective\tsize_bytes"),
        ("\n" + ROW, "'allgather,4096,ring,ll128,"),
        ((HEADER + ROW).encode("utf-16"), "`iconv"),
        (
            HEADER + "# a comment\n\n" + ROW.replace("ring", "rnig"),
            "algorithm 'rnig' in line 4 of t.csv (1)",
        ),
        (HEADER + ROW.replace("ring", "ri\rng"), "algorithm 'ri\ufffdng' in line 2 of t.csv (1)"),
        (HEADER + ROW.replace("4096", "4K"), "size_bytes '4K' in line 2 of t.csv (1)"),
        (HEADER + ROW.replace("20.5", "20.5us"), "latency_us '20.5us' in line 2 of t.csv (1)"),
        (HEADER + ROW.replace(",8,2,16", ",99,2,16"), "channels '99' in line 2 of t.csv"),
        (HEADER + ROW.replace(",8,2,16", ",8,2,1.5"), "ranks '1.5' in line 2 of t.csv (1)"),
        (HEADER + "allgather,4096,ring\n", "line 2 of t.csv (1)"),
        (OWN.replace("1.5", "fast"), "duration_us 'fast' in line 2 of t.csv (1)"),
        (OWN + "8,1\n" + OWN[OWN.index("\n") + 1 :].replace("ring", "rnig"), None),
    ],
)
def test_a_mistake_is_told_with_its_line_its_value_and_a_remedy(text, words, tmp_path: Path, monkeypatch, capsys):
    path = tmp_path / "t.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = command(monkeypatch, capsys, path, "--store", tmp_path / "s.db")
    if words is None:
        out = " ".join(out.split())
        assert " line 3 of t.csv" in out
        assert "algorithm 'rnig' in line 4 of t.csv" in out
    else:
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "t.csv" in err
        assert words in err


# ---- summaries, and headers in comments ----


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


def test_times_in_another_unit_are_refused_with_the_right_one(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "summary.csv"
    path.write_text("collective,size_bytes,time_ms,ranks\nall_reduce,4096,0.05,8\n")
    code, _, err = command(monkeypatch, capsys, path, "--store", tmp_path / "s.db")
    assert (code, "time_us" in err) == (2, True)


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("Nsight", "Time (%),Total Time (ns),Instances,Avg (ns),Name\n45.0,12,1,12.0,ncclDevKernel_AllReduce_Sum\n"),
        ("HTA", ",rank,comp_comm_overlap_pctg\n0,0,45.2\n"),
        ("OSU", "# OSU MPI-CUDA Allreduce Latency Test v7.3\n# Size       Avg Latency(us)\n4    10.2\n"),
        ("perftest", " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]\n 65536  5000  392.0  391.9\n"),
    ],
)
def test_other_tools_tables_are_refused_by_name(tmp_path: Path, tool: str, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=tool):
        read_trace(path)
