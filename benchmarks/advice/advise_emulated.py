"""Whether bucket and prefetch depth that `zerotune advise` names, or `autotune` finds, are the best, in the emulation.

On every shipped fabric two ranks train a small GPT with zero_runtime under each bucket and prefetch depth of a grid,
on the virtual clock. `advise` is told one of these runs, a small bucket with nothing gathered ahead, and names another
by its steps. The figure is how much longer the step of that one is than the best of the grid; below zero it is shorter.
`gain_error_p90` is how far off, as a share, the logarithm of what a configuration gains over the first is predicted.
The runtime's own search (`autotune=True`) begins in the middle and is judged likewise when it is done. Times are of
the emulation and say nothing of real networks. Two ranks of the InfiniBand fabrics are on one node.

Run: python -m benchmarks advise_emulated [--fabrics NAME ...] [--steps N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Final, NamedTuple

import msgspec

from benchmarks.advice.advise_emulated_worker import BATCH, SHAPE
from benchmarks.lib.argument_types import natural
from benchmarks.lib.reporting import Result, report, say
from zerotune.agent.nccl import fabric
from zerotune.store.records import StepRecord
from zerotune.tuner.advice.configuration import Software, ZeroConfiguration
from zerotune.tuner.advice.constants import DEFAULT
from zerotune.tuner.advice.hardware.clusters import cluster
from zerotune.tuner.advice.models.model_shape import from_dimensions
from zerotune.tuner.advice.problem import Measured, Problem
from zerotune.tuner.advice.search import seconds_per_sequence
from zerotune.tuner.offline.advise.measured import compute_factor

N_RANKS: Final = 2
"""One for each of two cores: more would wait for a processor, not for the virtual clock."""
BUCKETS_BYTES: Final = tuple(1 << place for place in (18, 19, 20, 21, 22, 23))
"""A twelfth of a layer of the model to nearly three layers."""
PREFETCHES: Final = (0, 1, 2)
AUTOTUNED: Final = "4194304:1:autotune"
"""Where the runtime's own search begins: a bucket of the middle, and the depth that is the default."""
TIMEOUT_S: Final = 1800
"""Of one job, which takes seconds: what takes longer hangs."""
_LEAST_GAIN: Final = 0.05
"""Log; of smaller gains the error is no share."""
QUICK: Final = ("ethernet_boxes",)
_KERNELS: Final = msgspec.structs.replace(DEFAULT, contention=0.0)
"""The virtual clock's computation loses nothing beside collectives but where a fabric says so."""


def grid(stage: int) -> list[ZeroConfiguration]:
    """What is run; the first is what the user begins with."""
    depths = PREFETCHES if stage == 3 else (1,)
    return [
        ZeroConfiguration(
            stage=stage, micro_batch=BATCH, bucket_bytes=bucket, prefetch=depth, overlaps_post_step_gather=stage < 3
        )
        for bucket, depth in itertools.product(BUCKETS_BYTES, depths)
    ]


class Ran(NamedTuple):
    """The mean step of each configuration, of what the runtime found by itself, and after how many steps it did."""

    steps: dict[ZeroConfiguration, StepRecord]
    autotuned_us: float
    n_searched: int


def run(name: str, configurations: Sequence[ZeroConfiguration], n_steps: int) -> Ran:
    """Train under each configuration on a fabric.

    Args:
        name: of the fabric.
        configurations: to run.
        n_steps: measured of each.

    Returns:
        What came of it.
    """
    autotuned = f"{configurations[0].stage}:{AUTOTUNED}"
    words = {f"{one.stage}:{one.bucket_bytes}:{one.prefetch}": one for one in configurations}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(N_RANKS), "-m"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ZEROTUNE_FABRIC": name,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [*command, "benchmarks.advice.advise_emulated_worker", str(n_steps), *words, autotuned],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    found, searched = {}, (0.0, 0)
    for line in done.stdout.splitlines():
        if line.startswith("step "):
            _, which, total, exposed, n_before = line.split()
            if which == autotuned:
                searched = float(total), int(n_before)
            else:
                found[words[which]] = StepRecord(0, 0, float(total), float(exposed))
    if len(found) < len(words) or not searched[1]:
        raise SystemExit(f"{name}: the ranks ended early:\n{done.stderr[-2000:]}")
    return Ran(found, *searched)


def measured_problem(name: str, known: ZeroConfiguration, step: StepRecord) -> Problem:
    """What `advise` is asked, with one measured step.

    Args:
        name: of the fabric.
        known: what ran.
        step: its step.

    Returns:
        The problem.
    """
    shape = from_dimensions(SHAPE.n_layers, SHAPE.width, SHAPE.n_heads, SHAPE.n_context, SHAPE.n_tokens)
    problem = Problem(
        shape=shape,
        cluster=cluster(name, max(1, -(-N_RANKS // fabric.load(name).ranks_per_node)), DEFAULT,
                        gpus_per_node=min(N_RANKS, fabric.load(name).ranks_per_node)),
        software=Software(precision="fp32"),
        constants=_KERNELS,
    )  # fmt: skip
    return msgspec.structs.replace(problem, measured=Measured(compute_factor(problem, known, [step]), None))


def judged(names: Sequence[str], n_steps: int) -> Iterator[Result]:
    """How much longer than the best a step is, by fabric and stage."""
    worst = worst_autotuned = -1.0
    n_searched = 0
    errors: list[float] = []
    for name in names:
        say(f"{name} ...")
        for stage in (2, 3):
            configurations = grid(stage)
            ran = run(name, configurations, n_steps)
            steps = ran.steps
            begun, best = configurations[0], min(steps.values(), key=lambda step: step.duration_us)
            problem = measured_problem(name, begun, steps[begun])
            predicted = {one: seconds_per_sequence(problem, one) for one in configurations}
            chosen = steps[min(configurations, key=predicted.__getitem__)]
            over = chosen.duration_us / best.duration_us - 1
            worst = max(worst, over)
            yield Result(f"step_over_best_stage{stage}_{name}", over, "share", "<= 0.03")
            gained = steps[begun].duration_us / chosen.duration_us - 1
            yield Result(f"step_gained_stage{stage}_{name}", gained, "share")
            for one in configurations[1:]:
                gain = math.log(steps[begun].duration_us / steps[one].duration_us)
                if abs(gain) > _LEAST_GAIN:
                    errors.append(abs(math.log(predicted[begun] / predicted[one]) / gain - 1))
            over = ran.autotuned_us / best.duration_us - 1
            worst_autotuned, n_searched = max(worst_autotuned, over), max(n_searched, ran.n_searched)
            yield Result(f"autotuned_over_best_stage{stage}_{name}", over, "share", "<= 0.03")
    yield Result("step_over_best_worst", worst, "share", "<= 0.03")
    yield Result("gain_error_p90", quantiles(errors, n=10)[-1], "share")
    yield Result("autotuned_over_best_worst", worst_autotuned, "share", "<= 0.03")
    yield Result("autotuned_steps_most", n_searched, "count")


def main() -> None:
    """Run, judge, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabrics", nargs="+", choices=fabric.names(), default=list(fabric.names()), metavar="NAME")
    parser.add_argument("--steps", type=natural, default=4, help="measured of each configuration")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} alone, two steps each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names, n_steps = (QUICK, 2) if options.quick else (options.fabrics, options.steps)
    report("advise_emulated", list(judged(names, n_steps)), as_json=options.json)


if __name__ == "__main__":
    main()
