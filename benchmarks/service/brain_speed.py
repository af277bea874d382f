"""What the brain costs the daemon's service thread: taking measurements in, and thinking of the next plan.

    python -m benchmarks brain_speed [--quick] [--json]

A job of 1,000 keys on a generated fabric is played through the brain as the service feeds it: one block per
step, then the step, then `propose` and `decisions` on the same thread. Times are processor time of this
thread, so that a busy machine does not change them. Beside it, for scale, numpy's own least work on such a
block (np.unique of its keys and one np.bincount) is timed in the same run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np

from benchmarks.lib.reporting import Result, report
from zerotune.store.records import Collective, Phase, Plan, StepRecord, size_class
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.learning.brain import Brain, BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge

N_KEYS = 1000
N_RANKS, N_NODES = 16, 2
COMM_SHARE_OF_STEP = 0.3
PHASES = (Phase.forward_gather, Phase.backward_gather, Phase.gradient_scatter, Phase.post_step_gather, Phase.other)


class Job:
    """1,000 keys, each called `n_calls` times per step; durations follow a made-up law of the setting asked for."""

    def __init__(self, n_keys: int, n_calls: int) -> None:
        self._rng = np.random.default_rng(0)
        sizes = [int(2 ** (10 + at / 4)) + 8 for at in range(100)]
        keys = [
            (kind, phase, nbytes)
            for nbytes in sizes
            for kind in (Collective.all_gather, Collective.reduce_scatter)
            for phase in PHASES
        ][:n_keys]
        self.block = np.zeros(len(keys), MEASUREMENT)
        self.block["n_ranks"], self.block["n_nodes"] = N_RANKS, N_NODES
        self.block["collective"] = [int(kind) for kind, _, _ in keys]
        self.block["phase"] = [int(phase) for _, phase, _ in keys]
        self.block["message_bytes"] = [nbytes for _, _, nbytes in keys]
        self.block["algorithm"], self.block["protocol"], self.block["n_channels"] = 1, 2, 16
        self.block["is_default"], self.block["memory_pressure"] = 1, math.nan
        self.base_us = 15.0 + self.block["message_bytes"] / 2e4
        self.factor = np.ones(len(keys))
        self._rows = {(kind, phase, size_class(nbytes)): at for at, (kind, phase, nbytes) in enumerate(keys)}
        self._n_calls = n_calls
        self.step = self.adopted_at = 0
        self.plan = Plan(0)

    def follow(self, plan: Plan) -> None:
        self.plan, self.adopted_at = plan, self.step
        self.factor[:] = 1.0
        self.block["is_default"] = 1
        found = ((row, (row.collective, phase, size_class(row.min_bytes))) for row in plan.rows for phase in row.phases)
        for row, key in found:
            if (at := self._rows.get(key)) is None:
                continue
            code = 31 * int(row.candidate.algorithm or 0) + 7 * int(row.candidate.protocol or 0)
            self.factor[at] = 0.9 + 0.02 * ((code + row.candidate.n_channels) % 23)
            self.block["is_default"][at] = 0

    def run_step(self) -> np.ndarray:
        block = np.tile(self.block, self._n_calls)
        noise = self._rng.normal(0.0, 0.03, len(block))
        block["duration_us"] = np.tile(self.base_us * self.factor, self._n_calls) * np.exp(noise)
        block["epoch"], block["step"] = self.plan.epoch, self.step
        self.step += 1
        return block


Found = TypeVar("Found")


def cpu_us(work: Callable[[], Found]) -> tuple[float, Found]:
    """Microseconds of this thread's processor time, and what `work` returned."""
    start_ns = time.thread_time_ns()
    found = work()
    return (time.thread_time_ns() - start_ns) / 1000.0, found


def sums_by_key(keys: np.ndarray, duration_us: np.ndarray) -> np.ndarray:
    """The least that numpy needs for the same records."""
    return np.bincount(np.unique(keys, return_inverse=True)[1], duration_us)


def play(n_keys: int, n_calls: int, n_steps: int) -> dict[str, list[float]]:
    """Processor time by what was done: records observed and summed, steps, thinking.

    Args:
        n_keys: of the job.
        n_calls: in each step.
        n_steps: to play.

    Returns:
        Microseconds per record ("observe", "numpy"), milliseconds for the rest.
    """
    brain = Brain("speed", "fabric", {}, Knowledge(), BrainSettings(), lambda: 0.0)
    job = Job(n_keys, n_calls)
    times: dict[str, list[float]] = {"observe": [], "think": [], "numpy": [], "first": [], "step": []}
    for at in range(n_steps):
        block = job.run_step()
        took_us, _ = cpu_us(partial(brain.observe, block))
        if at:
            times["observe"].append(took_us / len(block))
        else:
            times["first"].append(took_us / 1000.0)
        keys = block["message_bytes"] * 8 + block["phase"]
        least_us, _ = cpu_us(partial(sums_by_key, keys, block["duration_us"]))
        times["numpy"].append(least_us / len(block))
        total_us = float(block["duration_us"].sum()) / COMM_SHARE_OF_STEP
        record = StepRecord(job.step - 1, job.plan.epoch, total_us)
        took_us, _ = cpu_us(partial(brain.step_finished, record))
        times["step"].append(took_us / 1000.0)
        took_us, plan = cpu_us(lambda: (brain.propose(), brain.decisions())[0])
        times["think"].append(took_us / 1000.0)
        plan = plan or job.plan.at(job.step - job.adopted_at)
        if plan is not job.plan:
            job.follow(plan)
            brain.adopted(plan.epoch, job.step)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer steps; ends within 60 s")
    arguments = parser.parse_args()
    n_steps = 60 if arguments.quick else 300
    results = []
    for n_keys, n_calls in ((N_KEYS, 4), (12, 11)):
        times = play(n_keys, n_calls, n_steps)
        name = f"{n_keys}_keys"
        observe, least = median(times["observe"]), median(times["numpy"])
        results += [
            Result(f"observe_us_per_record_{name}", observe, "us", "", "np.unique + bincount", observe / least),
            Result(f"first_block_ms_{name}", times["first"][0], "ms"),
            Result(f"step_p50_ms_{name}", median(times["step"]), "ms"),
            Result(f"step_p99_ms_{name}", float(np.quantile(times["step"], 0.99)), "ms", "<= 5"),
            Result(f"think_p50_ms_{name}", median(times["think"]), "ms"),
            Result(f"think_p99_ms_{name}", float(np.quantile(times["think"], 0.99)), "ms", "<= 5"),
            Result(f"think_max_ms_{name}", max(times["think"]), "ms"),
        ]
    report("brain_speed", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
