"""What would pay for a job that runs: one change of its configuration at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import msgspec

from zerotune.tuner.advice.configuration import ZeroConfiguration
from zerotune.tuner.advice.prediction.memory import batch_that_fits, memory_share
from zerotune.tuner.advice.prediction.step import spreads
from zerotune.tuner.advice.problem import Measured, Problem
from zerotune.tuner.advice.ranges import Range
from zerotune.tuner.advice.search import (
    BUCKETS_BYTES,
    PREFETCHES,
    RECOMPUTES,
    seconds_per_sequence,
)

LEAST_GAIN: Final = 0.01
"""Smaller gains are not worth a restart, nor a sentence."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A change that fits and pays."""

    change: str
    """`batch`, `bucket`, `prefetch`, `stage`, `recompute`, or two of them joined by "+"."""
    configuration: ZeroConfiguration
    gain: Range
    """More sequences per second, as a share."""
    memory_share: float
    """Of the GPU's memory, fragments included."""


def alternatives(problem: Problem, running: ZeroConfiguration) -> list[Alternative]:
    """The best of each kind of change, those that gain most first.

    What is measured should be in `problem`.

    Args:
        problem: model, cluster and software of the job.
        running: what it runs.

    Returns:
        Changes that fit and whose expected gain is LEAST_GAIN or more.
    """
    found: dict[str, Alternative] = {}
    before = seconds_per_sequence(problem, running)
    for change, changed in _changes(problem, running):
        share = memory_share(problem, changed)
        gain = before / seconds_per_sequence(problem, changed) - 1
        if share > 1 or gain < LEAST_GAIN:
            continue
        if change not in found or gain > found[change].gain.expected:
            found[change] = Alternative(
                change=change,
                configuration=changed,
                gain=gain_of(problem, running, changed),
                memory_share=share,
            )
    return sorted(found.values(), key=lambda one: -one.gain.expected)


def _changes(problem: Problem, running: ZeroConfiguration) -> Iterator[tuple[str, ZeroConfiguration]]:
    replace = msgspec.structs.replace
    for bucket in BUCKETS_BYTES:
        yield "bucket", replace(running, bucket_bytes=bucket)
    if running.stage == 3:
        for depth in PREFETCHES:
            yield "prefetch", replace(running, prefetch=depth)
    for batch in _larger_batches(problem, running):
        yield "batch", replace(running, micro_batch=batch)
    for change, field, values in (
        ("stage", "stage", (1, 2, 3) if problem.n_groups(running) > 1 else ()),
        ("recompute", "recompute", RECOMPUTES),
    ):
        for value in values:
            if value == getattr(running, field):
                continue
            changed = replace(running, **{field: value})
            if changed.stage != 3:
                changed = replace(changed, shard_ranks=0)
            if changed.recompute != "full":
                changed = replace(changed, partition_activations=False, offload_activations=False)
            fits = batch_that_fits(problem, changed)
            if fits >= running.micro_batch:
                yield change, changed
            if fits and fits != running.micro_batch:
                yield f"{change}+batch", replace(changed, micro_batch=fits)


def _larger_batches(problem: Problem, running: ZeroConfiguration) -> list[int]:
    """Doublings, and the largest that fits."""
    largest = batch_that_fits(problem, running)
    doubled = [running.micro_batch << place for place in range(1, 12)]
    return [batch for batch in (*doubled, largest) if running.micro_batch < batch <= largest]


def gain_of(problem: Problem, running: ZeroConfiguration, changed: ZeroConfiguration) -> Range:
    """More sequences per second than what runs gives, as a share.

    What is common to both cancels out, so the range is that of a ratio: computation and network slower or faster by
    their spreads, times the error that comparisons had elsewhere.

    Args:
        problem: as for `alternatives`.
        running: what the job runs.
        changed: what it could run.

    Returns:
        The gain; its range is empty where nothing is gained or lost alone.
    """
    compute, network = problem.measured.compute_factor or 1.0, problem.measured.network_factor or 1.0
    expected = seconds_per_sequence(problem, running) / seconds_per_sequence(problem, changed)
    ratios = [expected]
    for compute_log, network_log in itertools.product(*((-one, one) for one in spreads(problem))):
        moved = Measured(compute * math.exp(compute_log), network * math.exp(network_log))
        other = msgspec.structs.replace(problem, measured=moved)
        ratios.append(seconds_per_sequence(other, running) / seconds_per_sequence(other, changed))
    same_blocks = msgspec.structs.replace(running, bucket_bytes=changed.bucket_bytes, prefetch=changed.prefetch)
    constants = problem.constants
    overlap_spread = constants.overlap_error * abs(math.log(expected)) + constants.overlap_floor
    error = math.exp(overlap_spread if changed == same_blocks else constants.comparison_spread)
    return Range(min(ratios) / error - 1, expected - 1, max(ratios) * error - 1)
