"""How fast and how truly replay judges policies, and how fast our traces are read back.

python -m benchmarks replay_speed [--json] [--quick] [--no-check | --check-only] [--seed N]

Speeds are of one process's CPU time: four policies over a million collectives, and our trace format beside an .npy
file. `prediction_error_percent` holds in 19 of 20 cases (replay_check.py). Its peers predict no change, or keep the
exposed share of communication. --seed N draws other cases; --check-only leaves the speed out; --quick does 2 cases;
--no-check none.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks.lib.argument_types import natural
from benchmarks.lib.reporting import Result, options_of, report
from benchmarks.offline import replay_check
from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.records import Collective, Phase, StepRecord
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.offline.replay import DEFAULT_POLICIES, replay_table
from zerotune.tuner.offline.replay.table import from_own
from zerotune.tuner.traces.own.reader import OwnTrace, read_own

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
    gaps_ns = chance.integers(10_000, 400_000, n_records)
    block["start_ns"] = np.cumsum(gaps_ns + (block["duration_us"] * 1e3).astype(np.int64))
    block["sequence"] = index
    block["step"] = index // N_PER_STEP
    block["n_ranks"], block["n_nodes"], block["comm_id"] = 4, 4, 0xC0FFEE
    is_tuned = index // N_PER_STEP % 10 == 0
    block["algorithm"], block["protocol"], block["n_channels"] = 1, np.where(is_tuned, 0, 2), 8
    block["flags"], block["timing_source"] = np.where(is_tuned, 3, 2), 4
    return block


def steps_of(block: np.ndarray) -> list[StepRecord]:
    """Step records that go with the collectives; a third of the communication is exposed."""
    begins = block["start_ns"][::N_PER_STEP] / 1e3
    exposed_us = np.add.reduceat(block["duration_us"], np.arange(0, len(block), N_PER_STEP)) / 3
    return [StepRecord(step, 0, float(us), float(exposed_us[step])) for step, us in enumerate(np.diff(begins))]


def write(block: np.ndarray, directory: Path, n_block: int = 16384) -> Path:
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
    for first in range(0, len(block), n_block):
        log.record(block[first : first + n_block])
        log.flush()
    log.steps(steps_of(block))
    log.close()
    assert log.path is not None
    return log.path


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds: it is one thread, and other work on the machine must not count."""
    began = time.process_time()
    call()
    return time.process_time() - began


def check(*, quick: bool, seed: int) -> list[Result]:
    drawn = replay_check.worlds(seed)
    worlds, plans = (drawn[:1], replay_check.PLANS[:2]) if quick else (drawn, replay_check.PLANS)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for case in replay_check.cases(Path(folder), worlds, plans):
            found.append(case)
            print(
                f"{case.world}, {case.plan}: baseline {case.baseline_us:,.0f} us, predicted"
                f" {case.predicted_us:,.0f} ({case.low_us:,.0f}..{case.high_us:,.0f}), measured {case.measured_us:,.0f}"
                f", error {case.error_percent:.2f} %",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    n_cases = len(found)

    def nineteen_of_twenty(errors: list[float]) -> float:
        return sorted(errors)[-1 - n_cases // 20]

    error = nineteen_of_twenty([case.error_percent for case in found])
    unchanged = nineteen_of_twenty([case.change_percent for case in found])
    first_order = nineteen_of_twenty([case.first_order_error_percent for case in found])
    nearly_all = f">= {math.ceil(0.95 * n_cases)}"
    return [
        Result("prediction_error_percent", error, "%", "<= 5", "no change", error / unchanged),
        Result("prediction_error_percent_first_order", first_order, "%", "", "no change", first_order / unchanged),
        Result("cases_within_5_percent", sum(case.error_percent <= 5 for case in found), f"of {n_cases}", nearly_all),
        Result("cases_within_interval", sum(case.is_covered for case in found), f"of {n_cases}", nearly_all),
    ]


def main() -> None:
    parser = options_of(__doc__, quick="fewer rounds, 2 cases")
    parser.add_argument("--no-check", action="store_true", help="speed alone")
    parser.add_argument("--check-only", action="store_true", help="cases alone")
    parser.add_argument("--seed", type=natural, default=3, help="of the cases")
    arguments = parser.parse_args()
    if arguments.check_only and arguments.no_check:
        parser.error("--check-only and --no-check leave nothing to do; give one of them")
    results = [] if arguments.check_only else speed(quick=arguments.quick)
    if not arguments.no_check:
        results += check(quick=arguments.quick, seed=arguments.seed)
    report("replay_speed", results, as_json=arguments.json)


def speed(*, quick: bool) -> list[Result]:
    n_records = N_RECORDS
    n_rounds = 3 if quick else 7
    block = records(n_records)
    replayed, imported, plain = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = write(block, Path(folder))
        bytes_per_record = path.stat().st_size / n_records
        np.save(Path(folder) / "plain.npy", block)
        trace: OwnTrace = read_own(path)
        for _ in range(n_rounds):
            replayed.append(seconds(lambda: replay_table(from_own([trace]), DEFAULT_POLICIES)))
            imported.append(seconds(lambda: read_own(path)))
            plain.append(seconds(lambda: np.load(Path(folder) / "plain.npy")))
    peer = n_records / median(plain)
    import_rate = n_records / median(imported)
    return [
        Result("collectives_per_s", n_records / median(replayed), "1/s", ">= 1000000"),
        Result("import_records_per_s", import_rate, "1/s", ">= 500000", "numpy.load of a .npy", import_rate / peer),
        Result("trace_bytes_per_collective", bytes_per_record, "B", "<= 32", ".npy", bytes_per_record / 64),
    ]


if __name__ == "__main__":
    main()
