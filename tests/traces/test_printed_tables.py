"""nccl-tests' tables as they come out of logs: behind what others put before lines, damaged, in other units."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotune.store.errors import TraceError
from zerotune.store.records import Collective
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.left_out import LeftOut

HEADER = [
    "# Collective test starting: all_reduce_perf",
    "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304",
    "#",
    "# Using devices",
    "#  Rank  0 Group  0 Pid 10 on node00 device  0 [0000:00:00] NVIDIA H100",
    "#  Rank  1 Group  0 Pid 11 on node00 device  1 [0000:01:00] NVIDIA H100",
    "#",
    "#    size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong",
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
]
ROWS = [
    "  1048576        262144     float     sum      -1    35.24   29.75   29.75      0    35.60   29.46   29.46      0",
    "  2097152        524288     float     sum      -1    40.49   51.80   51.80      0    40.89   51.29   51.29      0",
    "  4194304       1048576     float     sum      -1    50.97   82.29   82.29      0    51.48   81.47   81.47      0",
]
END = ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 54.3", ""]
LINES = [*HEADER, *ROWS, *END]
TIMES_US = [35.24, 35.60, 40.49, 40.89, 50.97, 51.48]
BEFORE = (
    "2026-01-12T10:11:{:02d}.123456Z 01O ",
    "2026-01-12T10:11:{:02d}.123456789Z stdout F ",
    "Jan 12 10:11:{:02d} node01 nccl[1234]: ",
    "Jan 12 10:11:{:02d} ",
    "2026-01-12 10:11:{:02d},123 INFO [runner] ",
    "(RayTrainWorker pid=12{:02d}, ip=10.0.0.1) ",
    "nccl-test-launcher-abcde nccl ",
    "[pod/nccl-test-launcher/nccl] 2026-01-12T10:11:{:02d}.123456789Z ",
    "Mon Jan 12 10:11:{:02d} 2026<stdout>:",
    "Mon Jan 12 10:11:{:02d} 2026[1,0]<stdout>:",
    "run1.log:",
    "{}:",
    "{:4d}  ",
    "{:6d}\t",
    "> ",
    "gpu-{}.cluster | ",
    "\x1b[32m[{}] \x1b[0m",
)


def read(path: Path, lines: list[str], end: str = "\n") -> tuple[list[float | None], dict[LeftOut, int]]:
    """Times of what a file with these lines is read as, and what was left out."""
    path.write_text(end.join(lines), newline="")
    trace = read_trace(path)
    found = list(trace.observations())
    assert {(one.collective, one.n_ranks, one.n_nodes) for one in found} <= {(Collective.all_reduce, 2, 1)}
    return [one.duration_us for one in found], dict(trace.summary.unusable)


def exact(times_us: list[float]) -> list[float]:
    return pytest.approx(times_us, rel=1e-6)


@pytest.mark.parametrize("before", BEFORE)
def test_prefixes_of_lines_are_taken_off(tmp_path: Path, before: str) -> None:
    assert read(tmp_path / "t.log", [before.format(n) + line for n, line in enumerate(LINES)]) == (exact(TIMES_US), {})


DRESSES: dict[str, Callable[[str], str]] = {
    "coloured": lambda line: f"\x1b[32m{line}\x1b[0m",
    "numbers in bold": lambda line: line.replace("29.75", "\x1b[1m29.75\x1b[0m"),
    "Docker's JSON": lambda line: json.dumps({"log": line + "\n", "stream": "stdout", "time": "2026-01-12T10:11:12Z"}),
    "spaces of a browser": lambda line: line.replace("  ", "\xa0 "),
    "Markdown's bars": lambda line: line if line.startswith("#") else f"| {' | '.join(line.split())} |",
    "Markdown's bold": lambda line: line if line.startswith("#") else f"**{line.strip()}**",
}


@pytest.mark.parametrize("dress", DRESSES)
def test_decorations_around_lines_are_taken_off(tmp_path: Path, dress: str) -> None:
    assert read(tmp_path / "t.log", [DRESSES[dress](line) if line else "" for line in LINES]) == (exact(TIMES_US), {})


def test_each_run_of_a_file_may_stand_behind_something_else(tmp_path: Path) -> None:
    lines = [*LINES[:-1], *(f"{n:4d}  {line}" for n, line in enumerate(LINES[:-1])), *LINES]
    assert read(tmp_path / "t.log", lines) == (exact(3 * TIMES_US), {})


@pytest.mark.parametrize(
    ("plain", "damaged"),
    [
        ("2097152        524288", "2,097,152      524,288"),
        ("2097152 ", "2M "),
        ("  2097152", "~ 2097152"),
        ("  2097152", "10:11:12 2097152"),
        ("    float     sum", "    fl##t     sum"),
        ("40.49", "40,49"),
    ],
)
def test_a_damaged_row_is_counted_and_shown(tmp_path: Path, plain: str, damaged: str) -> None:
    rows = [ROWS[0], ROWS[1].replace(plain, damaged), ROWS[2]]
    assert rows[1] != ROWS[1]
    times_us, left_out = read(tmp_path / "t.log", [*HEADER, *rows, *END])
    assert times_us == exact(TIMES_US[:2] + TIMES_US[4:])
    assert left_out == {LeftOut.damaged_row: 1}


@pytest.mark.parametrize("unit", ["ms", "s", "ns"])
def test_times_in_another_unit_are_refused(tmp_path: Path, unit: str) -> None:
    header = [*HEADER[:-1], HEADER[-1].replace("(us)", f"({unit})")]
    with pytest.raises(TraceError, match=f"in {unit} "):
        read(tmp_path / "t.log", [*header, *ROWS, *END])


def test_a_time_that_its_bandwidth_contradicts_is_left_out(tmp_path: Path) -> None:
    wrong = {LeftOut.contradicting_time: 1}
    for bad in ("0.040", "404.9"):
        lines = [*HEADER, ROWS[0], ROWS[1].replace("40.49", bad), *END]
        assert read(tmp_path / "t.log", lines) == (exact([*TIMES_US[:2], TIMES_US[3]]), wrong)
    csv = ["collective,ranks,nodes,size,time,algbw,busbw", "all_reduce,2,1,1048576,35.24,29.75,29.75"]
    lines = [*csv, "all_reduce,2,1,2097152,0.04049,51.80,51.80", ""]
    assert read(tmp_path / "t.csv", lines) == (exact(TIMES_US[:1]), wrong)
    sides = [{"time": us, "alg_bw": 29.6, "bus_bw": 29.6, "nwrong": 0} for us in (35.24, 0.0356)]
    result = {"size": 1048576, "type": "float", "out_of_place": sides[0], "in_place": sides[1]}
    devices = [{"rank": rank, "hostname": "node00"} for rank in (0, 1)]
    document = {"version": 2, "start_time": "x", "args": ["all_reduce_perf"], "devices": devices, "results": [result]}
    assert read(tmp_path / "t.json", [json.dumps(document)]) == (exact(TIMES_US[:1]), wrong)
