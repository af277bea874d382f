"""What would pay for a job that runs: one change of its configuration at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from zerotune.tuner.advice.configuration import ZeroConfiguration
from zerotune.tuner.advice.problem import Measured, Problem
from zerotune.tuner.advice.ranges import Range
from zerotune.tuner.advice.search import (
    BUCKETS_BYTES,
    PREFETCHES,
    RECOMPUTES,
    batch_that_fits,
    memory_of,
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

    What is measured should be in `problem`. Errors of the model that both configurations share cancel out; the gain's
    range is what is left where computation or network, if not measured, are slower or faster by their spreads.

    Args:
        problem: model, cluster and software of the job.
        running: what it runs.

    Returns:
        Changes that fit and whose expected gain is LEAST_GAIN or more.
    """
    found: dict[str, Alternative] = {}
    before = seconds_per_sequence(problem, running)
    limit = problem.cluster.gpu.memory_bytes * problem.constants.usable_memory
    for change, changed in _changes(problem, running):
        memory = memory_of(problem, changed).total_bytes
        gain = before / seconds_per_sequence(problem, changed) - 1
        if memory > limit or gain < LEAST_GAIN:
            continue
        if change not in found or gain > found[change].gain.expected:
            found[change] = Alternative(
                change=change,
                configuration=changed,
                gain=_range(problem, running, changed, gain),
                memory_share=memory / limit,
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


def _range(problem: Problem, running: ZeroConfiguration, changed: ZeroConfiguration, expected: float) -> Range:
    compute, network = problem.measured.compute_factor or 1.0, problem.measured.network_factor or 1.0
    gains = [expected]
    for compute_log in (-problem.constants.compute_spread, problem.constants.compute_spread):
        for network_log in (-problem.constants.network_spread, problem.constants.network_spread):
            measured = Measured(
                compute * (1 if problem.measured.compute_factor else math.exp(compute_log)),
                network * (1 if problem.measured.network_factor else math.exp(network_log)),
            )
            other = msgspec.structs.replace(problem, measured=measured)
            gains.append(seconds_per_sequence(other, running) / seconds_per_sequence(other, changed) - 1)
    return Range(min(gains), expected, max(gains))
