"""Predicts a training step's time by part, and its throughput."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from ....store.records import Collective, CommunicatorClass
from ..hardware.clusters import Cluster
from ..problem import Problem, Range, ZeroConfiguration
from ..zero_formulas import PARAMETER_BYTES
from .compute import BlockTime, block_forward, loss_s, optimizer_s
from .micro_batches import KINDS, STREAMS, Part, Pieces, micro_batch
from .timeline import OpKind, Span, Timeline

_PLAYED: Final = 3


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step; they add up to it."""

    multiplying_s: float
    attention_s: float
    traffic_s: float
    """Time of element-wise operations, and of the loss."""
    recomputing_s: float
    tensor_parallel_s: float
    exposed_s: float
    """Time in which computation waits for the network."""
    contention_s: float
    """Time that computation loses beside the network."""
    offload_s: float
    """Exposed copies of activations to CPU memory and back."""
    optimizer_s: float
    waiting_s: float
    """Time of waiting for the CPU's launches."""

    @property
    def total_s(self) -> float:
        """The step."""
        return sum(float(getattr(self, name)) for name in self.__struct_fields__)

    @property
    def limit(self) -> str:
        """The largest part besides multiplication if it is a tenth of the step or more; else the GPU's peak."""
        others = {name: getattr(self, name) for name in self.__struct_fields__ if name != "multiplying_s"}
        name = max(others, key=others.__getitem__)
        return LIMITS[name] if others[name] > 0.1 * self.total_s else LIMITS["multiplying_s"]


LIMITS = {
    "multiplying_s": "the GPU's peak",
    "attention_s": "attention",
    "traffic_s": "memory bandwidth",
    "recomputing_s": "recomputation",
    "tensor_parallel_s": "tensor-parallel communication",
    "exposed_s": "exposed communication",
    "contention_s": "contention with communication",
    "offload_s": "the link to CPU memory",
    "optimizer_s": "the optimizer step",
    "waiting_s": "kernel launches",
}
"""Limits in words, for tables."""


class StepEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A step's time and throughput."""

    parts: StepParts
    step_s: Range
    tokens_per_s: Range
    """Tokens per second of all GPUs."""
    model_flops_utilization: Range
    """MFU: share of the peak, without recomputation."""
    hardware_tflops: float
    """Per GPU, with recomputation, as Narayanan et al. 2021 count, arXiv:2104.04473, equation 3."""
    network_s: float
    """Collectives of data parallelism, hidden or not."""
    extrapolated: bool
    """The cluster is larger than its description, or its GPUs are of a generation that no constant was fitted to."""


class _Modelled(NamedTuple):
    """The operations of a step, and the sources of its parts in `StepParts`."""

    pieces: Pieces
    forward: BlockTime
    recomputed: float
    tensor_parallel_s: float
    offload_s: float


class PlayedSpan(NamedTuple):
    """A simulated part of a step; times are seconds from the step's begin."""

    stream: str
    """`compute`, `network` (gathers and reductions), or `replicas` (hybrid sharding's all-reduces, on other links)."""
    kind: str
    """`forward`, `backward`, `gather`, `reduce`, `optimizer`."""
    begin_s: float
    end_s: float


def estimate(problem: Problem, configuration: ZeroConfiguration) -> StepEstimate:
    """One step; its ranges come from repeating it with computation and network slower and faster by their spreads."""
    shape, cluster = problem.shape, problem.cluster
    compute, network = _factors(problem)
    parts, network_s = _play(problem, configuration, compute, network)
    compute_spread, network_spread = map(math.exp, spreads(problem))
    low, high = (
        _play(problem, configuration, c, n)[0].total_s
        for c, n in (
            (compute / compute_spread, network / network_spread),
            (compute * compute_spread, network * network_spread),
        )
    )
    step = Range(low, parts.total_s, high)
    n_groups = cluster.n_gpus // configuration.n_model_parallel
    tokens = shape.n_context * configuration.micro_batch * configuration.accumulation * n_groups
    peak = 1e12 * cluster.gpu.peak(problem.software.precision) * cluster.n_gpus
    flops = tokens * shape.model_flops_per_token()
    again = {"none": 0.0, "half": 0.5, "full": 1.0}[configuration.recompute]
    repeated = shape.n_layers * (2 * shape.active_block_parameters + shape.attention_flops_per_token)
    return StepEstimate(
        parts=parts,
        step_s=step,
        tokens_per_s=step.inverse(tokens),
        model_flops_utilization=step.inverse(flops / peak),
        hardware_tflops=(flops + again * tokens * repeated) / step.expected / cluster.n_gpus / 1e12,
        network_s=network_s,
        extrapolated=cluster.is_extrapolated or not _knows_generation(problem),
    )


def spreads(problem: Problem) -> tuple[float, float]:
    """Spreads of the logarithms of computation's and communication's times, 90 %: smaller if they were measured."""
    cluster, constants, measured = problem.cluster, problem.constants, problem.measured
    widened = 1 + (0.5 * math.log2(cluster.n_nodes / cluster.network.known_nodes) if cluster.is_extrapolated else 0)
    compute, network = constants.compute_spread, constants.network_spread
    if not _knows_generation(problem):
        compute = math.hypot(compute, constants.generation_spread)
    if measured.compute_factor:
        compute *= constants.narrowed
    if measured.network_factor:
        network = max(network * constants.narrowed, measured.network_spread)
    return compute, network * widened


def _knows_generation(problem: Problem) -> bool:
    return problem.cluster.gpu.capability in problem.constants.matmul_shares


def step_parts(problem: Problem, configuration: ZeroConfiguration) -> StepParts:
    """The expected step of `estimate`, without ranges."""
    return _play(problem, configuration, *_factors(problem))[0]


def spans(problem: Problem, configuration: ZeroConfiguration) -> list[PlayedSpan]:
    """The simulated spans of `estimate`, for a picture; of many micro-batches, three."""
    modelled = _modelled(problem, configuration, *_factors(problem))
    timeline, found = Timeline(), []
    for program, durations_us, kinds in _micro_batches(problem, configuration, modelled.pieces):
        played: list[Span] = []
        timeline.step(program, durations_us, spans=played)
        for (kind, at, _), begin_us, end_us in played:
            if kind is not OpKind.wait:
                computes = kind is OpKind.compute
                stream = "compute" if computes else STREAMS[program.calls[at].stream]
                found.append(PlayedSpan(stream, KINDS[at] if computes else kinds[at], begin_us / 1e6, end_us / 1e6))
    return found


def _factors(problem: Problem) -> tuple[float, float]:
    return problem.measured.compute_factor or 1.0, problem.measured.network_factor or 1.0


def _micro_batches(problem: Problem, configuration: ZeroConfiguration, pieces: Pieces) -> list[Part]:
    """The micro-batches to simulate: of many, all but the first and the last are alike, and one of them counts."""
    played = min(configuration.accumulation, _PLAYED)
    overlaps = configuration.overlaps_post_step_gather and pieces.post_gather_s > 0
    return [
        micro_batch(
            pieces,
            configuration.prefetch,
            problem.cluster.network.skew_us / 1e6,
            overlaps=overlaps and index == 0,
            # Stages 0 and 1 keep whole gradients until the last micro-batch; stages 2 and 3 have no room for them.
            reduces=index == played - 1 or configuration.stage >= 2,
            optimizer_s=pieces.optimizer_s if index == played - 1 else None,
            post_gather_s=0.0 if overlaps else pieces.post_gather_s,
        )
        for index in range(played)
    ]


def _play(
    problem: Problem, configuration: ZeroConfiguration, compute: float, network: float
) -> tuple[StepParts, float]:
    """A step's parts, and the seconds of its collectives."""
    pieces, forward, recomputed, tensor_parallel_s, offload_s = _modelled(problem, configuration, compute, network)
    timeline, exposed_us, network_us = Timeline(), 0.0, 0.0
    marks = []
    for program, durations_us, _ in _micro_batches(problem, configuration, pieces):
        exposed_us += timeline.step(program, durations_us).exposed_us
        network_us += sum(durations_us)
        marks.append((exposed_us, network_us))
    n, played = configuration.accumulation, len(marks)
    alike = [late - early for early, late in zip(*marks[:2], strict=True)] if n > played else [0.0] * 2
    exposed_s, network_s = ((value + (n - played) * one) / 1e6 for value, one in zip(marks[-1], alike, strict=True))
    blocks = n * problem.shape.n_layers
    parts = StepParts(
        multiplying_s=3 * blocks * forward.multiplying_s,
        attention_s=3 * blocks * forward.attention_s,
        traffic_s=3 * blocks * forward.traffic_s + n * sum(pieces.loss_s),
        recomputing_s=recomputed * blocks * forward.total_s,
        tensor_parallel_s=blocks * tensor_parallel_s,
        exposed_s=exposed_s,
        contention_s=problem.constants.contention * max(0.0, network_s - exposed_s),
        offload_s=blocks * offload_s,
        optimizer_s=pieces.optimizer_s,
        waiting_s=3 * blocks * forward.waiting_s,
    )
    return parts, network_s


def _modelled(problem: Problem, configuration: ZeroConfiguration, compute: float, network: float) -> _Modelled:
    shape, cluster = problem.shape, problem.cluster
    split, stage = configuration.n_model_parallel, configuration.stage
    tokens = configuration.micro_batch * shape.n_context
    element = PARAMETER_BYTES[problem.software.precision]
    modelled = block_forward(problem, tokens, split)
    forward = BlockTime(**{name: compute * getattr(modelled, name) for name in modelled.__struct_fields__})
    loss = tuple(compute * part for part in loss_s(problem, tokens, split))
    recomputed = {"none": 0.0, "half": 0.5, "full": 1.0}[configuration.recompute]
    input_bytes = tokens * shape.width * element

    def time_s(collective: Collective, size: float, place: CommunicatorClass) -> float:
        return network * cluster.network.time_us(collective, size, place) / 1e6

    # Megatron's blocks: two all-reduces forward, two backward, two again if recomputed (paper, section 8).
    group = cluster.neighbours(split)
    one_reduce = time_s(Collective.all_reduce, input_bytes, group)
    forward_parallel, backward_parallel = 2 * one_reduce, (2 + 2 * recomputed) * one_reduce
    if configuration.partition_activations:
        backward_parallel += time_s(Collective.all_gather, input_bytes, group)
    moved_s = input_bytes / split / (1e9 * cluster.gpu.cpu_gbs) if configuration.offload_activations else 0.0
    forward_s = forward.total_s + forward_parallel
    backward_s = (2 + recomputed) * forward.total_s + backward_parallel
    offload = max(0.0, moved_s - forward_s), max(0.0, moved_s - backward_s)
    data = _DataParallel(configuration, cluster, element, time_s)
    own_block, own_outer = shape.block_parameters / split, shape.outer_parameters / split
    n_parameters = own_block * shape.n_layers + own_outer
    pieces = Pieces(
        forward_s=forward_s + offload[0],
        backward_s=backward_s + offload[1],
        gather_s=data.gather_s(own_block) if stage == 3 else 0.0,
        reduce_s=data.reductions(own_block, shape.n_layers),
        outer_gather_s=data.gather_s(own_outer) if stage == 3 else 0.0,
        outer_reduce_s=data.reduce_s(own_outer * element),
        loss_s=(loss[0], loss[1]),
        optimizer_s=compute * optimizer_s(problem, n_parameters / (data.n_shards if stage else 1)),
        post_gather_s=data.gather_s(n_parameters) if stage in (1, 2) else 0.0,
    )
    return _Modelled(pieces, forward, recomputed, forward_parallel + backward_parallel, sum(offload))


class _DataParallel:
    """Collectives among ranks that hold the same part of the model."""

    def __init__(
        self,
        configuration: ZeroConfiguration,
        cluster: Cluster,
        element: int,
        time_s: Callable[[Collective, float, CommunicatorClass], float],
    ) -> None:
        split = configuration.n_model_parallel
        n_ranks = cluster.n_gpus // split
        self.n_shards = min(configuration.shard_ranks or n_ranks, n_ranks)
        self.stage, self.element, self.time_s = configuration.stage, element, time_s
        self.bucket_bytes = configuration.bucket_bytes
        self.sharding = cluster.every(split, self.n_shards)
        self.replicating = cluster.every(split * self.n_shards, n_ranks // self.n_shards)

    def gather_s(self, n_parameters: float) -> float:
        """Time to gather all parameters of a part, in messages of at most a bucket."""
        return self._in_buckets(Collective.all_gather, n_parameters * self.element)

    def reduce_s(self, size: float) -> tuple[float, float]:
        """Times to reduce a part's gradients, then to sum them over replicas."""
        if self.stage == 0:
            return self._in_buckets(Collective.all_reduce, size), 0.0
        among = self.time_s(Collective.all_reduce, size / self.n_shards, self.replicating)
        return self._in_buckets(Collective.reduce_scatter, size), among

    def reductions(self, block_parameters: float, n_blocks: int) -> tuple[tuple[float, float], ...]:
        """Bytes sent after each block's backward: full buckets, and the rest after the last block.

        Stage 3 reduces each block by itself: its whole gradients are freed with its parameters.
        """
        size = block_parameters * self.element
        cap = math.inf if self.bucket_bytes is None else self.bucket_bytes  # one buffer is reduced at the end
        leaving, waiting = [], 0.0
        for index in range(n_blocks):
            waiting += size
            full = self.stage == 3 or waiting >= cap or index == n_blocks - 1
            leaving.append(self.reduce_s(waiting) if full else (0.0, 0.0))
            waiting = 0.0 if full else waiting
        return tuple(leaving)

    def _in_buckets(self, collective: Collective, size: float) -> float:
        cap = self.bucket_bytes or size
        n_full, rest = divmod(size, cap) if cap else (0, 0)
        seconds = n_full * self.time_s(collective, cap, self.sharding) if n_full else 0.0
        return seconds + (self.time_s(collective, rest, self.sharding) if rest else 0.0)
