"""Tries configurations on a cluster and ranks those that fit."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator
from operator import itemgetter
from typing import Final

import msgspec

from ...store.errors import UserError
from .hardware.clusters import MAX_GB, MAX_NODES, Cluster
from .models.model_shape import divisors, in_words
from .prediction.memory import MemoryParts, batch_that_fits, memory_of, memory_share
from .prediction.step import StepEstimate, estimate, step_parts
from .problem import Problem, Recompute, ZeroConfiguration

STAGES: Final = (0, 1, 2, 3)
RECOMPUTES: Final[tuple[Recompute, ...]] = ("none", "half", "full")
BUCKETS_BYTES: Final = tuple(mib << 20 for mib in (4, 8, 16, 32, 64, 128, 256))
PREFETCHES: Final = (0, 1, 2, 4)
_AS_GOOD: Final = 1.002
"""A setting that takes less memory is preferred if it is slower by no more than this."""
_HALVES: Final = 3
"""Batches to try: the largest, its half and its quarter; smaller ones are no faster."""
MAX_BATCH: Final = 10**9
"""Largest batch in sequences; a step with more takes years."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The user's requirements; None or empty: the best is searched."""

    global_batch: int | None = None
    """Sequences of all ranks per optimizer step."""
    stages: tuple[int, ...] = STAGES
    model_parallel: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = RECOMPUTES


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that fits, with its predictions."""

    configuration: ZeroConfiguration
    paper_name: str
    memory: MemoryParts
    memory_share: float
    """Share of the GPU's memory, fragments included."""
    step: StepEstimate
    limit: str
    """The largest part of a step besides multiplication."""


def search(problem: Problem, wanted: Wanted | None = None, top: int | None = None) -> list[Choice]:
    """The best micro-batch, bucket and prefetch of the `top` kinds of configuration that fit, the fastest first.

    Raises:
        UserError: the batch is too large, or no configuration fits; the text has the least changes that would fit.
    """
    wanted = wanted or Wanted()
    if wanted.global_batch is not None and wanted.global_batch > MAX_BATCH:
        raise UserError(f"a batch of {wanted.global_batch} sequences is none", f"give {MAX_BATCH:,} at most")
    ranked = _ranked(problem, wanted)
    if not ranked:
        raise _fits_nowhere(problem, wanted)
    found = [choice_of(problem, _refined(problem, one)) for one in ranked[:top]]
    return sorted(found, key=lambda choice: -choice.step.tokens_per_s.expected)


def choice_of(problem: Problem, configuration: ZeroConfiguration) -> Choice:
    """All predictions of a configuration."""
    memory, step = memory_of(problem, configuration), estimate(problem, configuration)
    return Choice(
        configuration=configuration,
        paper_name=configuration.paper_name,
        memory=memory,
        memory_share=memory.total_bytes / problem.constants.usable_memory / problem.cluster.gpu.memory_bytes,
        step=step,
        limit=step.parts.limit,
    )


def seconds_per_sequence(problem: Problem, configuration: ZeroConfiguration) -> float:
    """Expected seconds per sequence, by which configurations are ranked."""
    sequences = configuration.micro_batch * configuration.accumulation * problem.n_groups(configuration)
    return step_parts(problem, configuration).total_s / sequences


def fastest(problem: Problem, wanted: Wanted) -> Choice | None:
    """The best kind with the usual bucket and prefetch; None: nothing fits."""
    ranked = _ranked(problem, wanted)
    return choice_of(problem, ranked[0]) if ranked else None


def _ranked(problem: Problem, wanted: Wanted) -> list[ZeroConfiguration]:
    """The best micro-batch of every kind, the fastest first."""
    best = []
    for kind in _kinds(problem, wanted):
        tried = [(seconds_per_sequence(problem, one), one) for one in _batches(problem, wanted, kind)]
        if tried:
            best.append(min(tried, key=itemgetter(0)))
    return [one for _, one in sorted(best, key=itemgetter(0))]


def _kinds(problem: Problem, wanted: Wanted) -> Iterator[ZeroConfiguration]:
    """Stages, splits, shardings and activations; micro-batch 1."""
    cluster, shape = problem.cluster, problem.shape
    allowed = wanted.model_parallel or tuple(divisors(shape.n_kv_heads, cluster.gpus_per_node))
    for split in allowed:
        if cluster.n_gpus % split or shape.n_heads % split:
            continue
        n_groups = cluster.n_gpus // split
        node_groups = cluster.gpus_per_node // split
        for stage, recompute in itertools.product(wanted.stages, wanted.recompute):
            if n_groups == 1 and stage > 0:
                continue
            hybrids = (0, node_groups) if stage == 3 and 1 < node_groups < n_groups else (0,)
            divided = (
                ((False, False), (True, False), (True, True))
                if split > 1 and recompute == "full"
                else ((False, False),)
            )
            for shard_ranks, (partition, offload) in itertools.product(hybrids, divided):
                yield ZeroConfiguration(
                    stage=stage,
                    micro_batch=1,
                    n_model_parallel=split,
                    shard_ranks=shard_ranks,
                    recompute=recompute,
                    partition_activations=partition,
                    offload_activations=offload,
                )


def _batches(problem: Problem, wanted: Wanted, kind: ZeroConfiguration) -> Iterator[ZeroConfiguration]:
    """The largest micro-batch that fits, and its halves; for a given batch, its divisors."""
    batch = batch_that_fits(problem, kind)
    if not batch:
        kind = _thriftiest(kind)
        batch = batch_that_fits(problem, kind)
    if wanted.global_batch is None:
        for halves in range(_HALVES):
            if batch >> halves:
                yield msgspec.structs.replace(kind, micro_batch=batch >> halves)
        return
    per_group, rest = divmod(wanted.global_batch, problem.n_groups(kind))
    if rest or not per_group:
        return
    divisors_that_fit = [micro for micro in range(1, min(batch, per_group) + 1) if per_group % micro == 0]
    for micro in divisors_that_fit[-_HALVES:]:
        yield msgspec.structs.replace(kind, micro_batch=micro, accumulation=per_group // micro)


def _thriftiest(kind: ZeroConfiguration) -> ZeroConfiguration:
    return msgspec.structs.replace(kind, bucket_bytes=BUCKETS_BYTES[0], prefetch=PREFETCHES[0])


def _refined(problem: Problem, base: ZeroConfiguration) -> ZeroConfiguration:
    """With the fastest bucket and prefetch depth; among equally fast ones, those with less memory."""
    prefetches = PREFETCHES if base.stage == 3 else (1,)
    tried = [
        msgspec.structs.replace(base, bucket_bytes=bucket, prefetch=prefetch)
        for prefetch, bucket in itertools.product(prefetches, BUCKETS_BYTES)
    ]
    fitting = [one for one in tried if memory_share(problem, one) <= 1] or [base]
    times = {id(one): seconds_per_sequence(problem, one) for one in fitting}
    least = min(times.values())
    return next(one for one in fitting if times[id(one)] <= least * _AS_GOOD)


def _fits_nowhere(problem: Problem, wanted: Wanted) -> UserError:
    """The error if nothing fits: the missing memory, and the least changes that would fit."""
    cluster, gpu = problem.cluster, problem.cluster.gpu
    kinds = [_thriftiest(kind) for kind in _kinds(problem, wanted)]
    if not kinds:
        return _nothing_to_try(problem, wanted)
    gpus = f"{cluster.n_gpus} GPU{'s' * (cluster.n_gpus > 1)}"
    if wanted.global_batch is not None and any(batch_that_fits(problem, kind) for kind in kinds):
        return UserError(
            f"a batch of {wanted.global_batch} sequences cannot be divided among {gpus}",
            "give a multiple of the GPUs, or of a divisor of them with --model-parallel",
        )
    needed = math.ceil(
        min(memory_of(problem, kind).total_bytes for kind in kinds) / problem.constants.fillable_memory / 1e9
    )
    needed_gb = f"{needed:,} GB"
    remedies = [f"take GPUs of {needed_gb}"] if needed <= MAX_GB else []
    return UserError(
        f"{in_words(problem.shape.n_parameters)} parameters fit {gpus} of {gpu.memory_bytes / 1e9:.3g} GB in no way: "
        f"the thriftiest takes {needed_gb} of each",
        ", or ".join([*remedies, *_what_would_fit(problem, wanted)]) or "give a smaller model",
    )


def _nothing_to_try(problem: Problem, wanted: Wanted) -> UserError:
    """The error if the user's requirements leave no configuration, however large a GPU is."""
    n_gpus, n_heads = problem.cluster.n_gpus, problem.shape.n_heads
    possible = [split for split in wanted.model_parallel or (1,) if n_gpus % split == n_heads % split == 0]
    if not possible:
        splits = " or ".join(map(str, wanted.model_parallel))
        return UserError(
            f"model parallelism of {splits} does not divide {n_heads} heads and {n_gpus} GPUs", "give a divisor of both"
        )
    return UserError(
        f"stage {' or '.join(map(str, wanted.stages))} has nobody to share with: all {n_gpus} GPUs hold one model"
        if n_gpus > 1
        else f"stage {' or '.join(map(str, wanted.stages))} has nobody to share with on 1 GPU",
        "take more GPUs, or stage 0",
    )


def _what_would_fit(problem: Problem, wanted: Wanted) -> Iterator[str]:
    """Other least changes that would make a configuration fit."""
    n_nodes = range(problem.cluster.n_nodes, MAX_NODES + 1)  # more nodes never need more memory of each GPU
    enough = bisect_left(n_nodes, True, key=lambda n: _fitting(_with_nodes(problem, n), wanted) is not None)
    if enough < len(n_nodes):
        yield f"take {n_nodes[enough]} such nodes"
    freed = _fitting(problem, Wanted())
    if freed:
        fixed = (
            ("stage", freed.stage, wanted.stages),
            ("recompute", freed.recompute, wanted.recompute),
            ("model-parallel", freed.n_model_parallel, wanted.model_parallel or (freed.n_model_parallel,)),
        )
        yield "allow " + " ".join(f"--{name} {value}" for name, value, allowed in fixed if value not in allowed)
    n_context = problem.shape.n_context // 2
    while n_context >= 1:
        shape = msgspec.structs.replace(problem.shape, n_context=n_context)
        if _fitting(msgspec.structs.replace(problem, shape=shape), wanted):
            yield f"take sequences of {n_context} tokens"
            break
        n_context //= 2


def _fitting(problem: Problem, wanted: Wanted) -> ZeroConfiguration | None:
    """The first kind of configuration that fits."""
    kinds = map(_thriftiest, _kinds(problem, wanted))
    return next((kind for kind in kinds if batch_that_fits(problem, kind)), None)


def _with_nodes(problem: Problem, n_nodes: int) -> Problem:
    cluster = problem.cluster
    larger = Cluster(cluster.name, n_nodes, cluster.gpu, cluster.network, cluster.gpus_per_node)
    return msgspec.structs.replace(problem, cluster=larger)
