"""Chunk sizes of a plan in the real NCCL: what it launches with, where it asks for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANKS = Path(__file__).with_name("chunk_ranks.py")
ASKS_SINCE = (2, 30)
GRAIN_BYTES = {"simple": 512, "ll": 16, "ll128": 1920}


def launched(libnccl: Path, folder: Path, asks: str) -> dict:
    command = [sys.executable, *map(str, (RANKS, libnccl, folder, asks))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_plans_chunk_size_is_what_nccl_launches_with(release, tmp_path):
    version, libnccl = release
    if version < (2, 22):
        pytest.skip("its launches are not read")
    as_ever, found = (launched(libnccl, tmp_path, asks) for asks in ("no", "yes"))
    assert (as_ever.pop("asks"), found.pop("asks")) == (False, True)
    if version < ASKS_SINCE:
        assert found == as_ever
        return
    kept = ("no plan", "own", "own again", "group", "group own")
    assert {name: found[name] for name in kept} == {name: as_ever[name] for name in kept}
    assert found["own again"] == found["own"] == [found["beyond buffers"][0], 0]
    sizes = {"simple": ("simple", 65536), "ll": ("ll", 16384), "ll128": ("ll128", 32768), "tree": ("simple", 49152)}
    sizes["least of ll128"] = ("ll128", 4096)
    for name, (protocol, chunk_bytes) in sizes.items():
        assert found[name][0] == chunk_bytes // GRAIN_BYTES[protocol]
        assert as_ever[name][0] > found[name][0]
        assert as_ever[name][1:] == [0]
    # All records, timed ones, too, have what was asked for, whatever NCCL made of it.
    asked = {name: found[name][1:] for name in (*sizes, "beyond buffers")}
    assert asked == {name: [size] for name, (_, size) in sizes.items()} | {"beyond buffers": [2**25]}
    simple, own = found["simple"][0], found["own"][0]
    assert found["group alike"] == [simple, simple]
    assert found["switch"] == [own, own, own, simple]
    assert as_ever["switch"] == [own] * 4
