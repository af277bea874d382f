"""Files that are cut, refused by name, re-imported, or need a word from the user."""

from __future__ import annotations

import errno
import gzip
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from import_runs import OLD_NCCL_TESTS
from trace_samples import INSPECTOR

from zerotune.store.errors import TraceAccessError, TraceError
from zerotune.store.records import Algorithm, Collective, Phase, Protocol, Source
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.offline.export import export_measurements
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
    words = [sys.executable, "-m", "zerotune.tuner.cli", "store", "import", str(tmp_path), "--store", "s.db"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path.parent)
    assert (done.returncode, os.strerror(errno.EIO) in done.stderr) == (2, True)


def tar_of(text: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        member = tarfile.TarInfo("trace.json")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))
    return made.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"coll,nnodes,nranks,upto_bytes,algo,proto\nallreduce,2,16,1048576,tree,ll128\n", "tuner rules"),
        (b"# collective_type,min_bytes,max_bytes,algorithm,protocol\nallreduce,0,1024,ring,ll,-1,-1,-1\n", "rules"),
        (b"gpu_cc,op,dtype,shape_elems,replica_groups,devices_per_group,x\nsm_90,all-reduce,F32,256,1,8,2\n", "XLA"),
        (b"[INFO] [Rank 0] rank=0 | comm op: all_reduce | time (ms): 9.46 | msg size: 678.86 MB | \n", "DeepSpeed"),
        (b'{\n "zerotune_plan": 1,\n "rows": []\n}', "plan"),
        (tar_of(b"{}"), "archive"),
        (b"PAR1" + bytes(100), "Parquet"),
        (b"SQLite format 3\0" + bytes(100), "SQLite"),
    ],
)
def test_known_files_without_measurements_are_refused_by_name(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        read_trace(path)


def test_our_exported_measurements_come_back(tmp_path: Path):
    rows = np.zeros(3, MEASUREMENT)
    rows["n_ranks"], rows["n_nodes"], rows["message_bytes"] = 16, 2, (1 << 20, 1 << 21, 1 << 22)
    rows["duration_us"], rows["memory_pressure"] = (10.5, 20.25, 40.0), np.nan
    rows["collective"], rows["phase"] = Collective.all_gather, Phase.backward_gather
    rows["algorithm"], rows["protocol"], rows["n_channels"] = Algorithm.ring, Protocol.ll128, 8
    rows["is_default"], rows["source"] = (0, 1, 0), Source.sweep
    store = tmp_path / "store.db"
    with Store.open(store) as opened:
        opened.record_job("j", "fabric", {}, 0)
        opened.record_measurements("fabric", "j", rows)
        opened.flush()
    out = tmp_path / "m.csv"
    export_measurements(store, out)
    trace = read_trace(out)
    assert trace.format_name == "measurements_csv"
    (back,) = trace.measurements()
    for name in ("n_ranks", "n_nodes", "message_bytes", "duration_us", "collective", "phase", "algorithm", "protocol"):
        assert back[name].tolist() == rows[name].tolist(), name
    assert back["is_default"].tolist() == [0, 1, 0]
    assert set(back["source"].tolist()) == {Source.sweep}, "as it was measured, not as it came here"
    text = out.read_text().replace("all_gather", "all_dance", 1)
    out.write_text(text + "1,2\n")
    trace = read_trace(out)
    assert sum(map(len, trace.blocks())) == 2
    assert sum(trace.summary.unusable.values()) == 2


def test_old_nccl_tests_have_no_root_and_name_no_collective(tmp_path: Path):
    """Whole microseconds are no root, a small deviation is no wrong result; the user names the collective."""
    path = tmp_path / "100g.txt"
    path.write_text(OLD_NCCL_TESTS)
    rows, _ = records_of(path)
    assert len(rows) == 0
    rows, _ = records_of(path, collective=Collective.all_reduce)
    assert rows["duration_us"].tolist() == pytest.approx([734.4, 725.1, 11855.0, 11876.0])
    assert set(rows["collective"].tolist()) == {Collective.all_reduce}
    assert (rows["n_ranks"][0], rows["n_nodes"][0]) == (2, 2)
    path.write_text(OLD_NCCL_TESTS.replace("1e-06", "3e+00"))
    assert len(records_of(path, collective=Collective.all_reduce)[0]) == 0


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
