"""What predictions cost: seconds and megabytes of a fit, milliseconds of a lookup. Part of `prediction_held_out`.

python -m benchmarks prediction_held_out --by cost
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

import numpy as np

from benchmarks.lib.data.data_sets import fabric_problems, shipped, sweep_block
from benchmarks.lib.reporting import Result
from zerotune.agent.nccl import fabric
from zerotune.store.records import Collective, size_class
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling import trainer
from zerotune.tuner.modeling.correction.baked import Baked
from zerotune.tuner.modeling.features import CostPrior

RANKS = (16, 32, 64, 128)


def fit_here(n_measurements: int, n_communicators: int) -> None:
    """In a process of its own: prints seconds and the megabytes that fitting added."""
    machine = fabric.load("h100_ib_16")
    facts, n_per_octave = machine.describe(), 4.0 / n_communicators
    problems = [
        problem
        for n_ranks in RANKS[:n_communicators]
        for problem in fabric_problems(machine, facts, n_per_octave=n_per_octave, n_ranks=n_ranks)
    ]
    n_rows = sum(len(p.candidates) for p in problems)
    block = sweep_block(problems, n_each=-(-n_measurements // n_rows))[:n_measurements]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    record = trainer.fit(block, "fabric", facts)
    assert record is not None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(time.perf_counter() - start_s, time.process_time() - start_cpu_s, peak / 1024, (peak - before) / 1024)


def cost(n_measurements: int) -> Iterator[Result]:
    for n_communicators, what in ((1, ""), (len(RANKS), f"_{len(RANKS)}_communicators")):
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks.modeling.prediction_cost", str(n_measurements), str(n_communicators)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # as the daemon starts it
        ).stdout.split()
        wall_s, cpu_s, peak_mb, _ = map(float, output[-4:])
        yield Result(f"fit_s_{n_measurements}_measurements{what}", wall_s, "s", "<= 5")
        yield Result(f"fit_cpu_s_{n_measurements}_measurements{what}", cpu_s, "s", "<= 5")
        yield Result(f"fit_peak_memory_{n_measurements}_measurements{what}", peak_mb, "MB", "<= 500")
    facts = fabric.load("h100_ib_16").describe()
    data = next(one for one in shipped(1.0) if one.name == "h100_ib_16")
    record = trainer.fit(sweep_block(data.problems), "fabric", facts)
    assert record is not None
    known, costs = Knowledge((), Baked.from_bytes(record.blob), "m"), CostPrior(facts)
    place = data.problems[0].key.communicator
    sizes = np.linspace(12, 28, 500)
    times_ms = []
    for _ in range(15):
        start_s = time.thread_time()
        for kind in (Collective.all_gather, Collective.reduce_scatter):
            options = costs.candidates(place, kind)
            classes = np.array([size_class(int(2**one)) for one in sizes])
            known.guess(place, kind, options, 2.0**sizes, classes, costs)
        times_ms.append(1000 * (time.thread_time() - start_s))
    yield Result("predict_ms_1000_keys_all_candidates", median(times_ms), "ms", "<= 50")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    fit_here(int(sys.argv[1]), int(sys.argv[2]))
