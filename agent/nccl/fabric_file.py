"""The types of a fabric file, by which it is checked; docs/reference/formats.md explains each key."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Final, Literal

import msgspec

from ...store.records import Candidate, CommunicatorClass
from .cell_terms import StatedCell
from .truth import ChannelFactors, Channels, NotNegative, Positive, ProtocolName, Span, TruthCell, channel_factor

Count = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class BelievedSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """NCCL's topology numbers for communicators within a node, or across nodes; see `cell_terms.Topology`."""

    ring_channels: Channels
    ring_bw_intra_gbs: Positive
    tree_channels: Channels
    tree_bw_intra_gbs: Positive
    comm_channels: Channels
    ring_bw_inter_gbs: NotNegative = 0.0
    tree_bw_inter_gbs: NotNegative = 0.0
    latency_inter_us: NotNegative = 0.0
    type_inter: Annotated[int, msgspec.Meta(ge=0, le=11)] = 0
    plain_tree_pattern: bool = False
    same_channels: bool = True
    nvls_gbs: NotNegative = 0.0
    nvls_latency_us: NotNegative = 0.0
    nvls_channels: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    stated_cells: tuple[StatedCell, ...] = ()


class Belief(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The input of NCCL's cost model; see `cell_terms.Topology` for the fields."""

    compute_capability: Annotated[int, msgspec.Meta(ge=50, le=130)]
    type_intra: Annotated[int, msgspec.Meta(ge=0, le=11)]
    cpu_is_amd: bool = False
    nccl_version: tuple[int, int] = (2, 28)
    one_node: BelievedSpan | None = None
    many_nodes: BelievedSpan | None = None


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Real durations of collectives; no cell may be faster than the links.

    `follows_belief` makes NCCL's own model the truth, so that a tuner cannot gain anything. `recorded` names a CSV of
    measured points beside the fabric file; other cells come from `cells`.
    """

    intra_gbs: Positive
    """Rate of one GPU's links inside the node, one direction."""
    point_to_point_us: Positive
    """Latency of send, recv, all_to_all, gather and scatter."""
    inter_gbs: NotNegative = 0.0
    """Rate of one node's network, all adapters together, one direction."""
    follows_belief: bool = False
    cells: tuple[TruthCell, ...] = ()
    recorded: str = ""
    recorded_channel_factors: ChannelFactors = ()


class Compute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates of one rank's device, for durations of computation."""

    tflops: Positive
    efficiency: Annotated[float, msgspec.Meta(gt=0, le=1)]
    launch_us: NotNegative
    memory_gbs: Positive

    def matmul_us(self, n_flops: float) -> float:
        """Microseconds of dense arithmetic."""
        return n_flops / (self.tflops * self.efficiency * 1e6)

    def stream_us(self, n_bytes: float) -> float:
        """Microseconds to read and write `n_bytes` of device memory (optimizer, element-wise work)."""
        return n_bytes / (self.memory_gbs * 1e3)


class Contention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How collectives and computation slow each other down."""

    n_sms: Count
    sms_per_channel: NotNegative
    sharing: Share
    """0: overlapping collectives do not slow each other down; 1: they share the links evenly."""


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Device memory that NCCL allocates when it connects an algorithm; `nccl.memory` has NCCL's arithmetic."""

    device_mb: Positive
    channel_mb: NotNegative
    """Per channel and neighbour: the buffers of all protocols."""
    algorithm_mb: NotNegative
    """Per algorithm, in addition to its channels."""
    connects: Literal["all_channels", "used_channels"] = "all_channels"
    """Whether all of the communicator's channels are connected at once, as in NCCL, or only those that are used."""


class Noise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Random noise: a pure function of a seed and a key, so that all ranks draw the same numbers."""

    sigma: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Standard deviation of the logarithm of a duration."""
    arrival_skew_us: NotNegative
    """Mean extra delay of a rank on its way to a collective (exponential)."""

    def factor(self, seed: int, *key: int) -> float:
        """Lognormal factor on a duration, median 1."""
        radius = math.sqrt(-2.0 * math.log(_uniform(seed, 1, *key)))
        return math.exp(self.sigma * radius * math.cos(2.0 * math.pi * _uniform(seed, 2, *key)))

    def skew_us(self, seed: int, *key: int) -> float:
        """Delay of one rank before one collective; `key` must contain the rank."""
        return -self.arrival_skew_us * math.log(_uniform(seed, 3, *key))


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The effect of one of NCCL's variables on collectives."""

    name: str
    value: str
    us_factor: Positive = 1.0
    spans: tuple[Span, ...] = ("one_node", "many_nodes")
    fails: bool = False
    """With this value no communicator can be made."""


class ChunkEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The effect of a plan's chunk sizes on collectives."""

    protocol: ProtocolName
    us_factors: tuple[tuple[Count, Positive], ...]
    """(bytes of a chunk, factor on durations), rising in bytes; linear in between, constant outside."""
    spans: tuple[Span, ...] = ("one_node", "many_nodes")

    def us_factor(self, communicator: CommunicatorClass, setting: Candidate) -> float:
        """Duration of calls with this setting, relative to that with NCCL's own chunk size."""
        span = "one_node" if communicator.n_nodes == 1 else "many_nodes"
        applies = setting.protocol is not None and setting.protocol.name == self.protocol and span in self.spans
        return channel_factor(self.us_factors, setting.chunk_bytes) if applies and setting.chunk_bytes else 1.0


class FabricFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    title: str
    source: str
    """The origin of the numbers."""
    ranks_per_node: Count
    max_nodes: Count
    belief: Belief
    truth: Truth
    compute: Compute
    contention: Contention
    memory: Memory
    noise: Noise
    machine: str | None = None
    """A node's topology for NCCL's own library: a described machine, or a topology file (.xml) beside this file."""
    adapters: str = ""
    """A node's network adapters, in the format of `agent/machine/adapters.py`."""
    environment: tuple[Variable, ...] = ()
    chunks: tuple[ChunkEffect, ...] = ()


def _uniform(*key: int) -> float:
    """Uniform in (0, 1] from integers: SplitMix64's finaliser, applied to one after another."""
    state = _absorb(_prefix(key[:3]), key[3:])
    return ((state >> 11) + 1) / float(1 << 53)


@lru_cache(maxsize=4096)
def _prefix(words: tuple[int, ...]) -> int:
    """The state after seed, purpose and communicator: there are few, so they are cached."""
    return _absorb(0, words)


def _absorb(state: int, words: tuple[int, ...]) -> int:
    for word in words:
        state = (state + (word & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


_MASK: Final = (1 << 64) - 1
