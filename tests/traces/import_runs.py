"""`zerotune store import` run in this process, tables for it, and what it has recorded."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from zerotune.store.records import Algorithm, Collective, Protocol, Source
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.cli import main

ROWS = "allgather,{},ring,ll128,8,2,16,1,0,0.5,10.2,{}.5\n"
HEADER = (
    "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric,bandwidth_gbps,"
    "latency_us\n"
)


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["zerotune", "store", "import", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def stored(path: Path) -> list[tuple[int, float]]:
    with Store.open(path) as opened:
        rows = opened.measurements()
    return [(int(row["message_bytes"]), float(row["duration_us"])) for row in rows]


def table(path: Path, n_rows: int) -> Path:
    path.write_text(HEADER + "".join(ROWS.format(1024 * (1 + index), 20 + index) for index in range(n_rows)))
    return path


def old_store(path: Path) -> Path:
    """A store from before these were left out."""
    rows = np.zeros(6, MEASUREMENT)
    rows["n_ranks"], rows["n_nodes"], rows["message_bytes"], rows["memory_pressure"] = 16, 2, 65536, np.nan
    rows["collective"], rows["source"] = Collective.all_gather, Source.imported
    rows["algorithm"] = [255, 255, Algorithm.ring, Algorithm.ring, Algorithm.tree, Algorithm.tree]
    rows["protocol"] = [255, 255, *[Protocol.simple] * 2, *[Protocol.ll] * 2]
    rows["is_default"], rows["duration_us"] = [1, 1, 0, 0, 0, 0], [50, 51, 40, 41, 5, 6]
    with Store.open(path) as store:
        store.record_job("j", "f", {}, 16)
        store.record_measurements("f", "j", rows)
        rows["source"], rows["message_bytes"] = Source.live, 4096
        store.record_measurements("f", "j", rows)
        store.flush()
    return path


OLD_NCCL_TESTS = """# nThread 1 nGpus 1 minBytes 1048576 maxBytes 536870912 step: 2(factor) warmup iters: 5 iters: 20
#   Rank  0 Pid  14830 on       gpu9 device  0 [0x3d] GeForce RTX 2080 Ti
#   Rank  1 Pid   8349 on      gpu10 device  0 [0x3d] GeForce RTX 2080 Ti
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144   float     sum    734.4    1.43    1.43  1e-06    725.1    1.45    1.45  1e-06
    33554432       8388608   float     sum    11855    2.83    2.83  1e-06    11876    2.83    2.83  1e-06
"""
