"""How fast replay judges policies, and how fast our traces are read back.

    python benchmarks/replay_speed.py [--json] [--quick]

`collectives_per_s`: all four policies over a trace of a million collectives in memory, one process.
`import_records_per_s`: our own trace format, file to array. The peer is numpy's own reading of the same
records from an uncompressed .npy file.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from reporting import Result, report

from agent.nccl import fabric as fabrics
from agent.trace_log import TraceLog
from store.records import Collective, Phase
from store.wire import OBSERVATION_FIELDS
from tuner.replay import POLICIES, replay_table
from tuner.replay.table import from_own
from tuner.traces.own import OwnTrace, read_own

FABRIC = "ethernet_boxes"
N_RECORDS = 1_000_000
N_PER_STEP = 96


def records(n_records: int) -> np.ndarray:
    """A ZeRO-3 job's pattern: 96 collectives of 40 sizes a step, a tenth of them tuned."""
    chance = np.random.default_rng(0)
    index = np.arange(n_records)
    sizes = (1 << chance.integers(12, 25, 40)) * chance.integers(1, 5, 40)
    block = np.zeros(n_records, OBSERVATION_FIELDS)
    block["message_bytes"] = sizes[index % N_PER_STEP % 40]
    is_scatter = index % 3 == 2
    block["collective"] = np.where(is_scatter, Collective.reduce_scatter, Collective.all_gather)
    gather_phase = np.where(index % 3 == 0, Phase.forward_gather, Phase.backward_gather)
    block["phase"] = np.where(is_scatter, Phase.gradient_scatter, gather_phase)
    block["duration_us"] = 30 + block["message_bytes"] / 5e3 * chance.lognormal(0, 0.05, n_records)
    block["start_ns"] = np.cumsum(chance.integers(10_000, 400_000, n_records))
    block["sequence"] = index
    block["step"] = index // N_PER_STEP
    block["n_ranks"], block["n_nodes"], block["comm_id"] = 4, 4, 0xC0FFEE
    is_tuned = index // N_PER_STEP % 10 == 0
    block["algorithm"], block["protocol"], block["n_channels"] = 1, np.where(is_tuned, 0, 2), 8
    block["flags"], block["timing_source"] = np.where(is_tuned, 3, 2), 4
    return block


def write(block: np.ndarray, directory: Path) -> Path:
    described = fabrics.load(FABRIC)
    log = TraceLog(
        directory,
        job_id="bench",
        rank=0,
        n_ranks=4,
        fabric_id=described.fabric_id,
        fabric=described.describe(),
        version="0",
    )
    for first in range(0, len(block), 16384):
        log.record(block[first : first + 16384])
    log.close()
    assert log.path is not None
    return log.path


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end in one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a fifth of the records, fewer rounds")
    arguments = parser.parse_args()
    n_records = N_RECORDS // 5 if arguments.quick else N_RECORDS
    n_rounds = 3 if arguments.quick else 7
    block = records(n_records)
    replayed, imported, plain = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = write(block, Path(folder))
        bytes_per_record = path.stat().st_size / n_records
        np.save(Path(folder) / "plain.npy", block)
        trace: OwnTrace = read_own(path)
        for _ in range(n_rounds):
            replayed.append(seconds(lambda: replay_table(from_own([trace]), list(POLICIES))))
            imported.append(seconds(lambda: read_own(path)))
            plain.append(seconds(lambda: np.load(Path(folder) / "plain.npy")))
    peer = n_records / median(plain)
    import_rate = n_records / median(imported)
    results = [
        Result("collectives_per_s", n_records / median(replayed), "1/s", ">= 1,000,000"),
        Result("import_records_per_s", import_rate, "1/s", ">= 500,000", "numpy.load of a .npy", import_rate / peer),
        Result("trace_bytes_per_collective", bytes_per_record, "B", "<= 32", ".npy", bytes_per_record / 64),
    ]
    report("replay_speed", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
