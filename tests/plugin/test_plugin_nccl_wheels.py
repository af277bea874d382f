"""Our ABI table against NCCL's own releases, which need no GPU to be opened and read.

Opt-in (`pytest -m slow`): downloads a wheel of 150 to 400 MB per release and keeps only what it found.
ZEROTUNE_NCCL_WHEELS names other releases, e.g. "cu12:2.21.5 cu13:2.32.3"; ZEROTUNE_NCCL_CACHE the folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks.lib.nccl import nccl_releases
from zerotune.agent.nccl import library

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CU12 = """2.21.5 2.22.3 2.23.4 2.24.3 2.25.1 2.25.1.post1 2.26.2 2.26.2.post1 2.26.5 2.27.3 2.27.5 2.27.6 2.27.7 2.28.3
2.28.7 2.28.9 2.29.2 2.29.3 2.29.7 2.30.3 2.30.4 2.30.7 2.31.2 2.32.3"""
CU13 = "2.27.7 2.28.3 2.28.7 2.28.9 2.29.2 2.29.3 2.29.7 2.30.3 2.30.4 2.30.7 2.31.2 2.32.3"
DEFAULT_RELEASES = " ".join([*(f"cu12:{each}" for each in CU12.split()), *(f"cu13:{each}" for each in CU13.split())])
"""All that the registry had from 2.21 on when this was written."""
RELEASES = os.environ.get("ZEROTUNE_NCCL_WHEELS", DEFAULT_RELEASES).split()

TUNERS = {22: range(2, 4), 24: range(2, 5), 28: range(2, 6), 30: range(2, 7)}
PROFILERS = {
    23: range(1, 2),
    24: range(1, 3),
    26: range(1, 4),
    27: range(1, 5),
    28: range(1, 6),
    29: range(1, 7),
    31: range(1, 8),
}
EXPORTED_TUNERS = set(range(2, 8))
EXPORTED_PROFILERS = set(range(3, 8))
PROBE = """
import ctypes, sys
version = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(version))
print(version.value)
"""


def versions_named(binary: bytes, symbol: str) -> list[int]:
    return sorted({int(n) for n in re.findall(symbol.encode() + rb"_v(\d+)\0", binary)})


def facts(release: str) -> dict:
    """What the release's libnccl.so.2 says of itself; downloaded once."""
    cuda, version = release.split(":")
    known = nccl_releases.cache() / f"{cuda}-{version}.json"
    if known.exists():
        return json.loads(known.read_text())
    shared = known.with_name(f"libnccl-{cuda}-{version}.so.2")
    try:
        nccl_releases.download(cuda, version, shared)
    except RuntimeError as error:
        pytest.skip(str(error))  # the registry cannot be reached
    binary = shared.read_bytes()
    probe = subprocess.run([sys.executable, "-c", PROBE, str(shared)], capture_output=True, text=True, check=True)
    found = {
        "version": int(probe.stdout),
        "tuners": versions_named(binary, "ncclTunerPlugin"),
        "profilers": versions_named(binary, "ncclProfiler"),
        "names": [name for name in NAMES if name.encode() + b"\0" in binary],
        "variables": [name for name in VARIABLES if name.encode() + b"\0" in binary],
    }
    shared.unlink()
    known.write_text(json.dumps(found, indent=1))
    return found


NAMES = ["AllGather", "ReduceScatter", "AllReduce", "Broadcast", "Reduce"]
NAMES += ["TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT", "LL", "LL128", "SIMPLE"]
NAMES += ["ncclInt8", "ncclUint8", "ncclInt32", "ncclUint32", "ncclInt64", "ncclUint64", "ncclFloat16"]
NAMES += ["ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3", "ncclFloat8e5m2"]
VARIABLES = ["NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"]


def expected(table: dict[int, range], minor: int) -> list[int]:
    return list(next((table[since] for since in sorted(table, reverse=True) if minor >= since), range(0)))


@pytest.fixture(scope="module", params=RELEASES)
def release(request):
    return request.param, facts(request.param)


def test_the_release_is_what_its_wheel_says(release):
    name, found = release
    major, minor, patch = (int(part) for part in name.split(":")[1].split(".")[:3])
    assert found["version"] == major * 10000 + minor * 100 + patch


def test_nccl_looks_for_the_symbols_of_our_table(release):
    name, found = release
    minor = int(name.split(".")[1])
    assert found["tuners"] == ([2] if minor == 21 else expected(TUNERS, minor))
    assert found["profilers"] == expected(PROFILERS, minor)
    assert EXPORTED_TUNERS & set(found["tuners"])
    assert "NCCL_TUNER_PLUGIN" in found["variables"]
    if minor >= 26:
        assert EXPORTED_PROFILERS & set(found["profilers"])
        assert "NCCL_PROFILER_PLUGIN" in found["variables"]


def test_the_names_in_descriptors_are_those_we_know(release):
    name, found = release
    minor = int(name.split(".")[1])
    if minor >= 26:  # profilers that tell times give names
        missing = set(NAMES) - set(found["names"])
        assert not missing - ({"ncclFloat8e4m3", "ncclFloat8e5m2"} if minor == 24 else set())


def test_the_plugin_opens_beside_it(release):
    assert library.load().layout_version() == library.LAYOUT_VERSION
