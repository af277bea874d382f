"""NCCL Inspector beside ours: opt-in, since it comes as source only. NCCL_SOURCES names a checkout of NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("inspector_ranks.py")
STUBS = """
#include <string.h>
int cudaGetDevice(int *device) { *device = 0; return 0; }
const char *cudaGetErrorString(int code) { (void)code; return "?"; }
const char *get_git_version_info(void) { return "?"; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetUuid(void *uuid, int device) { memset(uuid, device + 1, 16); return 0; }
int cuGetErrorString(int code, const char **text) { (void)code; *text = "?"; return 0; }
"""
"""What it asks of CUDA."""


@pytest.fixture(scope="module")
def inspector(tmp_path_factory) -> Path:
    """Its library; libcuda.so lies beside it."""
    sources = Path(os.environ.get("NCCL_SOURCES", "/nowhere")) / "plugins" / "profiler" / "inspector"
    headers = [path for path in sorted(Path("/usr/local").glob("cuda*/include")) if (path / "cuda.h").exists()]
    if not sources.exists() or not headers:
        pytest.skip("NCCL_SOURCES names no checkout with NCCL Inspector, or there are no headers of CUDA")
    folder = tmp_path_factory.mktemp("inspector")
    stubs, library = folder / "libcuda.so", folder / "libnccl-profiler-inspector.so"
    (folder / "stubs.c").write_text(STUBS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", stubs, folder / "stubs.c"], check=True)
    units = [path for path in sources.glob("*.cc") if path.name != "version.cc"]
    includes = [f"-I{path}" for path in (headers[-1], sources, sources / "nccl")]
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-DNCCL_INSPECTOR_ENABLE_WARN=0"]
    subprocess.run(["c++", *flags, *includes, "-o", library, *units, stubs, "-ldl", "-lpthread"], check=True)
    return library


@pytest.mark.slow
def test_it_reports_every_collective_and_ours_those_of_its_window(release, inspector, tmp_path):
    version, libnccl = release
    if version < (2, 28):
        pytest.skip("Inspector's interface came with 2.28")
    settings = {
        "ZEROTUNE_NEXT_PROFILER": "inspector",
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": str(tmp_path / "dump"),
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "100000",
        "LD_LIBRARY_PATH": str(inspector.parent),
    }
    (tmp_path / "dump").mkdir()
    command = [sys.executable, *map(str, (RANKS, libnccl, tmp_path))]
    environment = os.environ | settings
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"name": "Inspector", "n_timed": 40, "n_faults": 0}
    lines = [json.loads(line) for file in (tmp_path / "dump").iterdir() for line in file.read_text().splitlines()]
    seen = Counter((line["coll_perf"]["coll"], line["coll_perf"]["coll_timing_source"]) for line in lines)
    assert seen == {("AllGather", "kernel_gpu"): 2, ("AllReduce", "kernel_gpu"): 40, ("ReduceScatter", "kernel_gpu"): 6}
