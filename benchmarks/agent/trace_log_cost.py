"""What `launch --log-trace` costs: CPU time of the agent's threads, and bytes on disk.

    python -m benchmarks trace_log_cost [--json] [--quick]

`trace_pack_us_per_collective` is the log alone: records as they come out of the rings, packed and written.
`trace_pack_percent_of_step` puts that into a step of 100 ms with 100 collectives, denser than ZeRO-3 of a 7 B
model on eight H100. `trace_agent_percent` is measured inside a training run on the emulated NCCL: CPU time of all
of the agent's threads as a share of the wall time, with the log on, less the same without it; waking up more
often, draining and timing each collective are in it. It is a background thread's time: no step waits for it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.lib.reporting import Result, report
from benchmarks.offline import replay_check
from benchmarks.offline.replay_speed import records, write

STEP_US = 100_000.0
COLLECTIVES_PER_STEP = 100
FLUSH_RECORDS = 1000
"""What a second of such steps logs: one block."""


def pack_us(n_records: int) -> tuple[float, float]:
    """(CPU us, bytes) per collective of the log alone, in blocks of a second."""
    block = records(n_records)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        path = write(block, Path(folder), FLUSH_RECORDS)
        return (time.process_time() - began) * 1e6 / n_records, path.stat().st_size / n_records


def agent_percent(place: Path, n_steps: int, *options: object) -> float:
    """CPU time of rank 0's agent threads as a share of the wall time of a run on the emulated NCCL.

    Args:
        place: folder for the run's files.
        n_steps: to train.
        options: further ones of `zerotune launch`.

    Returns:
        Percent, of the second half of the run.
    """
    spent = place / "spent.json"
    os.environ["REPLAY_WORKER_SPENT"] = str(spent)
    world = replay_check.World("ethernet_boxes", "zero3")
    replay_check.run(world, place, *options, n_steps=n_steps)
    found = json.loads(spent.read_text())
    return float(100 * found["agent_ns"] / found["wall_ns"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end in one line of JSON")
    parser.add_argument("--quick", action="store_true", help="fewer records and steps, one run each")
    arguments = parser.parse_args()
    n_rounds, n_steps = (1, 60) if arguments.quick else (3, 300)
    packed = [pack_us(20_000) for _ in range(n_rounds + 2)]
    logged, bare = [], []
    for _ in range(n_rounds):
        with tempfile.TemporaryDirectory() as folder:
            logged.append(agent_percent(Path(folder), n_steps, "--log-trace", Path(folder) / "trace"))
        with tempfile.TemporaryDirectory() as folder:
            bare.append(agent_percent(Path(folder), n_steps))
    pack_us_each = median(one[0] for one in packed)
    pack_percent = 100 * pack_us_each * COLLECTIVES_PER_STEP / STEP_US
    extra = max(median(logged) - median(bare), 0.0)
    bare_name = "agent without the log"
    results = [
        Result("trace_bytes_per_collective", median(one[1] for one in packed), "B", "<= 32"),
        Result("trace_pack_us_per_collective", pack_us_each, "us"),
        Result("trace_pack_percent_of_step", pack_percent, "%", "<= 0.2"),
        Result("trace_agent_percent", extra, "%", "<= 0.2", bare_name, median(logged) / median(bare)),
    ]
    report("trace_log_cost", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
