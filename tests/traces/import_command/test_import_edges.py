"""Files that are cut, refused by name, re-imported, or need a word from the user."""

from __future__ import annotations

import errno
import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trace_samples import INSPECTOR

from zerotune.store.errors import TraceAccessError
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.traces import read_trace


def records_of(path: Path, **options: object) -> tuple[np.ndarray, list[str]]:
    trace = read_trace(path, **options)
    blocks = list(trace.blocks())
    return (np.concatenate(blocks) if blocks else np.empty(0, OBSERVATION_FIELDS)), trace.summary.remarks


def test_a_cut_file_says_so(tmp_path: Path):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    whole.write_text(INSPECTOR)
    cut.write_text(INSPECTOR[:-40])
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(INSPECTOR.encode())[:-30])
    all_rows, notes = records_of(whole)
    assert notes == []
    rows, notes = records_of(cut)
    assert len(rows) == len(all_rows) - 1
    assert "is cut" in notes[0]
    assert "cut" in records_of(packed)[1][0]


@pytest.mark.parametrize("name", ["a.json", "job.rank00000.zttrace"])
def test_what_the_system_does_not_let_us_read_is_neither_damaged_nor_unknown(tmp_path: Path, name: str):
    """Permissions do not hold for root; this file nobody can read."""
    for file in (name, f"b{name}"):
        (tmp_path / file).symlink_to("/proc/self/mem")
    with pytest.raises(TraceAccessError, match=os.strerror(errno.EIO)):
        read_trace(tmp_path)
    words = [sys.executable, "-m", "zerotune.tuner.cli", "import", str(tmp_path), "--store", str(tmp_path / "s.db")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, os.strerror(errno.EIO) in done.stderr) == (2, True)


def calls_log(n_lines: int) -> str:
    line = (
        "n:1:2 [0] NCCL INFO AllGather: opCount 1f sendbuff 0x7f0000000000 recvbuff 0x7f0000100000 count 1024 "
        "datatype 9 op 0 root 0 comm 0x55a0 [nranks=16] stream 0x55b0\n"
    )
    return line * n_lines


LARGE = {
    "inspector": ("", INSPECTOR * 200, ""),
    "nccl_debug": ("n:1:2 [0] NCCL INFO NCCL version 2.28.9\n", calls_log(4000), ""),
    "tuner_csv": (
        "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric,bandwidth_gbps,"
        "latency_us\n",
        "allgather,1048576,ring,ll128,8,2,16,1,0,0.5,10.25,100.5\n" * 10_000,
        "",
    ),
    "nccl_tests": (
        "# nThread 1\n# Collective test starting: all_gather_perf\n",
        "     1048576        16384     float    none      -1    20.25   51.78   38.84       0    23.50   44.62   33.47"
        "       0\n" * 5_000,
        "",
    ),
    "kineto": (
        '{"schemaVersion": 1, "traceEvents": [\n',
        '{"ph": "X", "cat": "cpu_op", "name": "aten::view", "ts": 1, "dur": 1, "args": {"Ev Idx": 1}},\n' * 5_000,
        '{"ph": "X", "cat": "cpu_op", "name": "aten::view", "ts": 1, "dur": 1, "args": {}}]}\n',
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LARGE)
def test_a_file_of_150_mb_is_read_within_40_mb(tmp_path: Path, name: str):
    """More than what reading the first megabytes of it takes, that is; the file stands for one larger than memory."""
    begin, body, end = LARGE[name]
    small, large = tmp_path / "small.log", tmp_path / "large.log"
    for path, n_bytes in ((small, 8 << 20), (large, 150 << 20)):
        with path.open("w") as file:
            file.write(begin)
            for _ in range(n_bytes // len(body) + 1):
                file.write(body)
            file.write(end)
    script = (
        "import sys, resource; from zerotune.tuner.traces import read_trace\n"
        "n = sum(len(block) for block in read_trace(sys.argv[1]).blocks())\n"
        "print(n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks_kb = []
    for path in (small, large):
        told = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
        n_records, peak_kb = map(int, told.stdout.split())
        assert n_records > 0 or name == "kineto"
        peaks_kb.append(peak_kb)
    assert peaks_kb[1] - peaks_kb[0] < 40 * 1024, peaks_kb
