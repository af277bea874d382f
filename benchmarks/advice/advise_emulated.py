"""Whether bucket and prefetch depth that `zerotune advise` names, or `autotune` finds, are the best, in the emulation.

On every shipped fabric two ranks train a small GPT with zero_runtime under each bucket and prefetch depth of a grid,
on the virtual clock. `advise` is told one of these runs, a small bucket with nothing gathered ahead, and names another
by its steps. The figure is how much longer the step of that one is than the best of the grid; below zero it is shorter.
What a configuration gains over that first run is predicted with a range: `held_out_gain_in_range_share` is how many
gains lie in it on fabrics that had no say in it, those whose name's SHA-256 begins with an even byte; `gain_error_p90`
is how far off, as a share, the logarithm of a gain is on the others. The runtime's own search (`autotune=True`) begins
in the middle and is judged likewise when it is done. Times are of the emulation and say nothing of real networks. Two
ranks of the InfiniBand fabrics are on one node. What is in the file of `--keep` is not run again.

Run: python -m benchmarks advise_emulated [--fabrics NAME ...] [--steps N] [--keep steps.jsonl] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Final, NamedTuple

import msgspec

from benchmarks.advice.advise_emulated_worker import BATCH, SHAPE
from benchmarks.lib.argument_types import a_file_to_write, positive
from benchmarks.lib.reporting import Result, report, say
from zerotune.agent.nccl import fabric
from zerotune.store.records import StepRecord
from zerotune.tuner.advice.alternatives import gain_of
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


def is_set_aside(name: str) -> bool:
    """Whether no constant may be chosen by that fabric."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of a fabric and a stage gave."""

    fabric: str
    stage: int
    n_steps: int
    steps: list[StepRecord]
    """The mean step of each configuration, in the order of `grid`."""
    autotuned_us: float
    """Of what the runtime found by itself."""
    n_searched: int
    """After so many steps."""


def run(name: str, stage: int, n_steps: int) -> Ran:
    """Train under each configuration of the grid on a fabric.

    Args:
        name: of the fabric.
        stage: 2 or 3.
        n_steps: measured of each.

    Returns:
        What came of it.
    """
    configurations = grid(stage)
    autotuned = f"{stage}:{AUTOTUNED}"
    words = [f"{stage}:{one.bucket_bytes}:{one.prefetch}" for one in configurations]
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
                found[which] = StepRecord(0, 0, float(total), float(exposed))
    if len(found) < len(words) or not searched[1]:
        raise SystemExit(f"{name}: the ranks ended early:\n{done.stderr[-2000:]}")
    return Ran(
        fabric=name,
        stage=stage,
        n_steps=n_steps,
        steps=[found[one] for one in words],
        autotuned_us=searched[0],
        n_searched=searched[1],
    )


def runs(names: Sequence[str], n_steps: int, keep: Path | None) -> Iterator[Ran]:
    """Train on each fabric in both stages.

    Args:
        names: of the fabrics.
        n_steps: measured of each configuration.
        keep: what is in this file is not run again, and the rest is added; None: nothing is kept.

    Yields:
        What came of each fabric and stage.
    """
    known = _kept(keep) if keep is not None else {}
    for name, stage in itertools.product(names, (2, 3)):
        ran = known.get((name, stage, n_steps))
        if ran is None:
            say(f"{name}, stage {stage} ...")
            ran = run(name, stage, n_steps)
            if keep is not None:
                with keep.open("ab") as file:
                    file.write(msgspec.json.encode(ran) + b"\n")
        yield ran


def _kept(path: Path) -> dict[tuple[str, int, int], Ran]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [msgspec.json.decode(line, type=Ran) for line in lines]
    return {(one.fabric, one.stage, one.n_steps): one for one in found}


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
    # The fabric's file says how long collectives take, as measuring them would.
    return msgspec.structs.replace(problem, measured=Measured(compute_factor(problem, known, [step]), 1.0))


class _Gain(NamedTuple):
    """What a configuration gains over the first."""

    fabric: str
    error: float | None
    """Share by which the logarithm of the gain is off; None: it is too small to tell."""
    is_in_range: bool


def gains(ran: Ran) -> list[_Gain]:
    """How well what each configuration of the grid gains over the first is predicted."""
    configurations = grid(ran.stage)
    begun, step = configurations[0], ran.steps[0]
    problem = measured_problem(ran.fabric, begun, step)
    found = []
    for one, its_step in zip(configurations[1:], ran.steps[1:], strict=True):
        ratio = step.duration_us / its_step.duration_us
        gain = gain_of(problem, begun, one)
        log = math.log(ratio)
        error = abs(math.log1p(gain.expected) / log - 1) if abs(log) > _LEAST_GAIN else None
        found.append(_Gain(ran.fabric, error, gain.low <= ratio - 1 <= gain.high))
    return found


def judged(all_runs: Iterable[Ran]) -> Iterator[Result]:
    """How much longer than the best a step is, by fabric and stage; how gains are predicted."""
    over_best, autotuned_over, predicted, n_searched = [], [], [], 0
    for ran in all_runs:
        name, configurations = f"stage{ran.stage}_{ran.fabric}", grid(ran.stage)
        begun, best_us = ran.steps[0], min(step.duration_us for step in ran.steps)
        problem = measured_problem(ran.fabric, configurations[0], begun)
        times = [seconds_per_sequence(problem, one) for one in configurations]
        chosen_us = ran.steps[times.index(min(times))].duration_us
        over_best.append(chosen_us / best_us - 1)
        yield Result(f"step_over_best_{name}", over_best[-1], "share", "<= 0.03")
        yield Result(f"step_gained_{name}", begun.duration_us / chosen_us - 1, "share")
        autotuned_over.append(ran.autotuned_us / best_us - 1)
        n_searched = max(n_searched, ran.n_searched)
        yield Result(f"autotuned_over_best_{name}", autotuned_over[-1], "share", "<= 0.03")
        predicted += gains(ran)
    yield Result("step_over_best_worst", max(over_best), "share", "<= 0.03")
    yield Result("autotuned_over_best_worst", max(autotuned_over), "share", "<= 0.03")
    yield Result("autotuned_steps_most", n_searched, "count")
    aside, seen = ([one for one in predicted if is_set_aside(one.fabric) is kept] for kept in (True, False))
    errors = [one.error for one in seen if one.error is not None]
    if len(errors) > 1:
        yield Result("gain_error_p90", quantiles(errors, n=10)[-1], "share")
    for label, some in (("", seen), ("held_out_", aside)):
        if some:
            within = sum(one.is_in_range for one in some) / len(some)
            yield Result(f"{label}gain_in_range_share", within, "share", ">= 0.9")


def main() -> None:
    """Run, judge, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabrics", nargs="+", choices=fabric.names(), default=list(fabric.names()), metavar="NAME")
    parser.add_argument("--steps", type=positive, default=4, help="measured of each configuration")
    parser.add_argument("--keep", type=a_file_to_write, help="file of runs that are done, read and added to")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} alone, two steps each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names, n_steps = (QUICK, 2) if options.quick else (options.fabrics, options.steps)
    try:
        found = list(judged(runs(names, n_steps, options.keep)))
    except msgspec.DecodeError:
        parser.error(f"--keep {options.keep} holds no runs of this benchmark; name another file")
    report("advise_emulated", found, as_json=options.json)


if __name__ == "__main__":
    main()
