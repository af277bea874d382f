"""How well the stage fingerprint recognises training from its bare collectives, and how fast.

    python benchmarks/stage_fingerprint.py [--json] [--quick]

Sequences of models, bucket sizes and options that the rules were not written for: families by width and
depth, DDP with buckets, ZeRO 1 to 3 as our runtime, FSDP2 and DeepSpeed order their collectives, with and
without gradient accumulation, scalars for norms and losses in between, and workloads that are none of these.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reporting import Result, report

from store.records import Collective, Stage
from tuner.stage import StageFingerprint

Step = list[tuple[Collective, int]]
AG, RS, AR = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce


def ddp(layers: list[int], n_micro: int, rng: np.random.Generator) -> Step:
    bucket = int(rng.choice([1, 25, 100])) << 20
    total, sizes = sum(layers), []
    while total > 0:
        sizes.append(min(bucket, total))
        total -= bucket
    return [(AR, nbytes) for nbytes in sizes]


def zero1(layers: list[int], n_micro: int, rng: np.random.Generator) -> Step:
    reduced = [(AR, nbytes) for nbytes in reversed(layers)]
    return [*reduced, (AG, sum(layers))]


def zero2(layers: list[int], n_micro: int, rng: np.random.Generator) -> Step:
    scatters = [(RS, nbytes) for _ in range(n_micro) for nbytes in reversed(layers)]
    gathers = [(AG, nbytes) for nbytes in layers] if rng.random() < 0.5 else [(AG, sum(layers))]
    return [*scatters, *gathers]


def zero3(layers: list[int], n_micro: int, rng: np.random.Generator) -> Step:
    step: Step = []
    last_only = rng.random() < 0.3
    for micro in range(n_micro):
        step += [(AG, nbytes) for nbytes in layers]
        for nbytes in reversed(layers):
            step.append((AG, nbytes))
            if not last_only or micro == n_micro - 1:
                step.append((RS, nbytes))
    return step


def nothing(layers: list[int], n_micro: int, rng: np.random.Generator) -> Step:
    if rng.random() < 0.5:  # expert parallel inference
        return [(Collective.all_to_all, nbytes) for nbytes in layers]
    return [(Collective.broadcast, nbytes) for nbytes in layers]


KINDS = {
    Stage.ddp: ddp, Stage.zero1: zero1, Stage.zero2: zero2, Stage.zero3: zero3, Stage.unknown: nothing,
}  # fmt: skip


def sequences(n_each: int) -> Iterator[tuple[Stage, list[Step]]]:
    """Three steps of `n_each` random models per stage."""
    rng = np.random.default_rng(11)
    for _ in range(n_each):
        width = int(rng.integers(256, 8192))
        depth = int(rng.integers(2, 80))
        block = 12 * width * width * int(rng.choice([2, 4]))
        layers = [50_000 * width * 2, *[block] * depth]
        n_micro = int(rng.choice([1, 1, 2, 4, 8]))
        for stage, make in KINDS.items():
            step = make(layers, n_micro, rng)
            if rng.random() < 0.5:  # a gradient norm and a loss, wherever they fall
                for scalar in range(2):
                    step.insert(int(rng.integers(0, len(step) + 1)), (AR, 4 * (1 + scalar)))
            yield stage, [step] * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    n_right = n_all = 0
    us_per_step = []
    for stage, steps in sequences(20 if arguments.quick else 200):
        fingerprint = StageFingerprint()
        for number, step in enumerate(steps):
            kinds = np.array([kind for kind, _ in step], dtype=np.int64)
            sizes = np.array([nbytes for _, nbytes in step], dtype=np.int64)
            started = time.perf_counter()
            fingerprint.add(kinds, sizes, np.full(len(step), number))
            us_per_step.append(1e6 * (time.perf_counter() - started))
        n_all += 1
        n_right += fingerprint.stage is stage
    results = [
        Result("stage_accuracy", 100 * n_right / n_all, "%", ">= 99"),
        Result("stage_us_per_step", float(np.median(us_per_step)), "us", "<= 50"),
    ]
    report("stage_fingerprint", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
