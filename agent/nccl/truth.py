"""Real durations of collectives on an emulated fabric: α-β terms per cell, or recorded points.

A cell's time is `base + hops * latency + n_channels * channel_us + wire_bytes / bandwidth(n_channels)`.
`wire_bytes` and bandwidths follow nccl-tests' bus convention, so that bandwidths compare with link rates.
Bandwidth grows with channels until the link saturates. `channel_factors` modify that curve; several peaks are allowed.
`n_channels` are the channels that run; the last one may count by its share of traffic. `message_bytes` is NCCL's
nBytes, the whole buffer.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from ...store.records import Algorithm, Collective, CommunicatorClass, Protocol

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Channels = Annotated[int, msgspec.Meta(ge=1, le=64)]
ChannelFactors = tuple[tuple[Channels, Positive], ...]

AlgorithmName = Literal["tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"]
ProtocolName = Literal["ll", "ll128", "simple"]
CollectiveName = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"]
Span = Literal["one_node", "many_nodes"]

MAX_POINT_BYTES: Final = 1 << 50
"""Limit of a measured point's message bytes: a pebibyte, more than any device memory, and exact as a float."""
_SATURATION: Final = 4.0
"""Sharpness of the bend between channel-limited and link-limited bandwidth."""


class TruthCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """True terms of one (algorithm, protocol) for some collectives on one or many nodes."""

    algorithm: AlgorithmName
    protocol: ProtocolName
    spans: tuple[Span, ...]
    base_us: Positive
    channel_gbs: Positive
    """Bus bandwidth of one channel."""
    limit_gbs: Positive
    """Bus bandwidth that more channels cannot exceed."""
    collectives: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce")
    intra_us: NotNegative = 0.0
    """Latency of a hop inside a node."""
    inter_us: NotNegative = 0.0
    """Latency of a hop between nodes."""
    channel_us: NotNegative = 0.0
    """Fixed time that each channel adds."""
    channel_factors: ChannelFactors = ()
    """(n_channels, factor on the bandwidth), linear in between, constant outside."""

    def gbs(self, n_channels: float) -> float:
        """Bus bandwidth with `n_channels`, GB/s."""
        by_channels = n_channels * self.channel_gbs
        bent: float = (by_channels**-_SATURATION + self.limit_gbs**-_SATURATION) ** (-1 / _SATURATION)
        return bent * channel_factor(self.channel_factors, n_channels)

    def fixed_us(self, communicator: CommunicatorClass, collective: Collective, n_channels: float) -> float:
        """The part of a collective's time that does not depend on its bytes."""
        n_intra, n_inter = hops(communicator, collective, Algorithm[self.algorithm])
        hops_us = n_intra * self.intra_us + n_inter * self.inter_us
        return self.base_us + hops_us + n_channels * self.channel_us


def channel_factor(factors: ChannelFactors, n_channels: float) -> float:
    """Piecewise linear value of a channel table at `n_channels`; 1 for an empty table."""
    if not factors:
        return 1.0
    index = bisect_left(factors, (n_channels, 0.0))
    if index == len(factors):
        return factors[-1][1]
    if index == 0 or factors[index][0] == n_channels:
        return factors[index][1]
    (low, at_low), (high, at_high) = factors[index - 1], factors[index]
    return at_low + (at_high - at_low) * (n_channels - low) / (high - low)


def hops(communicator: CommunicatorClass, collective: Collective, algorithm: Algorithm) -> tuple[int, int]:
    """Number of consecutive hops of a collective: (inside a node, between nodes).

    A ring hops from rank to rank; other algorithms have log2(nodes) levels between nodes.
    """
    n_ranks, n_nodes = communicator.n_ranks, communicator.n_nodes
    passes = 2 if collective is Collective.all_reduce else 1
    if algorithm is Algorithm.ring:
        n_inter = passes * (n_nodes - 1)
        return passes * (n_ranks - 1) - n_inter, n_inter
    levels = math.ceil(math.log2(n_nodes))
    if algorithm is Algorithm.pat:
        return 0, passes * levels
    if algorithm is Algorithm.tree:
        return passes * (-(-n_ranks // n_nodes) - 1), passes * levels
    return passes, passes * levels


def wire_share(communicator: CommunicatorClass, collective: Collective) -> float:
    """Bus bytes per message byte, nccl-tests' convention."""
    n_ranks = communicator.n_ranks
    if collective is Collective.all_reduce:
        return 2 * (n_ranks - 1) / n_ranks
    if collective in (Collective.broadcast, Collective.reduce, Collective.send, Collective.recv):
        return 1.0
    return (n_ranks - 1) / n_ranks


class RecordedCurve(NamedTuple):
    """Measured times of one cell by message bytes, for `n_ranks` ranks at the default channel count."""

    n_ranks: int
    message_bytes: tuple[float, ...]
    duration_us: tuple[float, ...]

    def time_us(self, collective: Collective, n_ranks: int, message_bytes: float, factor: float) -> float:
        """Time on any number of ranks: another number than the recorded one changes the number of steps.

        Broadcast and reduce send all bytes in each step, so they take as long on any number of ranks. `factor` is on
        the bandwidth. If it is below 1, it slows down only times that bandwidth limits.
        """
        steps_ratio = (n_ranks - 1) / (self.n_ranks - 1)
        step_bytes = message_bytes * self.n_ranks / n_ranks
        if collective in (Collective.broadcast, Collective.reduce):
            step_bytes = message_bytes
            steps_ratio = 1.0
        duration_us = self._interpolate(step_bytes)
        if factor < 1.0:
            duration_us = max(duration_us, step_bytes * self.duration_us[-1] / self.message_bytes[-1] / factor)
        return steps_ratio * duration_us

    def _interpolate(self, message_bytes: float) -> float:
        """Log-log between points, constant below, linear in bytes above."""
        xs, ys = self.message_bytes, self.duration_us
        if message_bytes <= xs[0]:
            return ys[0]
        if message_bytes >= xs[-1]:
            return ys[-1] * message_bytes / xs[-1]
        index = bisect_left(xs, message_bytes)
        share = math.log(message_bytes / xs[index - 1]) / math.log(xs[index] / xs[index - 1])
        return float(ys[index - 1] * (ys[index] / ys[index - 1]) ** share)


CurveKey = tuple[Collective, Algorithm, Protocol]


def read_points(lines: Iterable[str]) -> Mapping[CurveKey, RecordedCurve]:
    """Curves from CSV: collective, algorithm, protocol, n_ranks, message_bytes, duration_us.

    Several points of one size are averaged.

    Times are made non-decreasing in bytes: if a larger message was faster, its time counts for the smaller one, since
    the difference is noise. Raises ValueError or KeyError on malformed rows.
    """
    cells: dict[CurveKey, dict[int, list[float]]] = {}
    n_ranks_of: dict[CurveKey, int] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        key = (Collective[row["collective"]], Algorithm[row["algorithm"]], Protocol[row["protocol"]])
        message_bytes, duration_us = int(row["message_bytes"]), float(row["duration_us"])
        if not 0 < message_bytes <= MAX_POINT_BYTES or not 0 < duration_us < math.inf or int(row["n_ranks"]) < 2:
            raise ValueError(f"impossible point {dict(row)}")
        if n_ranks_of.setdefault(key, int(row["n_ranks"])) != int(row["n_ranks"]):
            raise ValueError(f"one cell is recorded with different n_ranks: {dict(row)}")
        cells.setdefault(key, {}).setdefault(message_bytes, []).append(duration_us)
    return {key: _curve(n_ranks_of[key], points) for key, points in cells.items()}


def _curve(n_ranks: int, points: Mapping[int, Sequence[float]]) -> RecordedCurve:
    sizes = sorted(points)
    durations = [sum(points[size]) / len(points[size]) for size in sizes]
    for index in range(len(durations) - 2, -1, -1):
        durations[index] = min(durations[index], durations[index + 1])
    return RecordedCurve(n_ranks, tuple(float(size) for size in sizes), tuple(durations))


class Line(NamedTuple):
    """A setting's time as a linear function of the message's bytes."""

    fixed_us: float
    us_per_byte: float


@lru_cache(maxsize=8192)
def line(cell: TruthCell, communicator: CommunicatorClass, collective: Collective, n_channels: float) -> Line:
    """A cell's time as a linear function of the message's bytes."""
    share = wire_share(communicator, collective)
    return Line(cell.fixed_us(communicator, collective, n_channels), share / (1000.0 * cell.gbs(n_channels)))
