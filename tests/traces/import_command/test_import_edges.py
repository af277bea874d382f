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
from zerotune.store.records import Collective
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
def test_a_file_that_cannot_be_read_is_told_as_such(tmp_path: Path, name: str):
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
