"""A machine that a fabric file describes: NCCL's belief about it, and real durations of collectives.

`message_bytes` is NCCL's nBytes, the whole buffer.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, Literal

import msgspec

from ...store.counted import counted
from ...store.errors import FabricError
from ...store.records import Algorithm, Collective, CommunicatorClass, Protocol
from . import catalog, cost_model, memory
from .cell_terms import Topology
from .cost_model import IGNORE
from .fabric_file import BelievedSpan, FabricFile
from .truth import CurveKey, RecordedCurve, Span, channel_factor, line, wire_share
from .twin.machines import Node

_NVLS: Final = {Algorithm.nvls: "NVLS", Algorithm.nvls_tree: "NVLSTree"}
"""Names for NCCL_ALGO."""
_REMEDY: Final = "use fewer ranks or a larger fabric (`zerotune hardware` lists them)"
_BELIEVED_RATES: Final = ("ring_bw_intra_gbs", "ring_bw_inter_gbs", "tree_bw_intra_gbs", "tree_bw_inter_gbs")


class Fabric:
    """One machine or cluster, read from a fabric file; immutable. See `load`."""

    def __init__(
        self, name: str, file: FabricFile, recorded: Mapping[CurveKey, RecordedCurve], node: Node | None = None
    ) -> None:
        self.name = name
        self.title = file.title
        self.source = file.source
        self.ranks_per_node = file.ranks_per_node
        self.max_nodes = file.max_nodes
        self.belief = file.belief
        self.truth = file.truth
        self.compute = file.compute
        self.contention = file.contention
        self.memory = file.memory
        self.noise = file.noise
        self.node = node
        self._recorded = recorded
        self._cells = {
            (Collective[collective], Algorithm[cell.algorithm], Protocol[cell.protocol], span): cell
            for cell in file.truth.cells
            for collective in cell.collectives
            for span in cell.spans
        }
        self._environment = file.environment
        self.chunks = file.chunks
        self._adapters = file.adapters
        # The id excludes parts that do not change durations by default: names of adapters, variables, chunk sizes.
        left_out = ("adapters", "environment", "chunks")
        facts = {name: getattr(file, name) for name in file.__struct_fields__ if name not in left_out}
        content = msgspec.json.encode([facts, sorted(recorded.items()), *([node.topology] if node else [])])
        self._digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        self._topologies: dict[CommunicatorClass, Topology] = {}

    @cached_property
    def fabric_id(self) -> str:
        """Identifies the file's content: a changed file is another fabric."""
        return f"emulated-{self.name}-{self._digest}"

    def id_under(self, environment: Mapping[str, str]) -> str:
        """`fabric_id`, with those of NCCL's variables that change durations here."""
        changed = self.variables(environment)
        return "+".join([self.fabric_id, *(f"{name}={value}" for name, value in changed.items())])

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables in the environment that change durations here."""
        return {one.name: one.value for one in self._environment if environment.get(one.name) == one.value}

    def us_factor(self, communicator: CommunicatorClass, environment: Mapping[str, str]) -> float:
        """The factor of these variables on durations; FabricError if with one of them no communicator can be made."""
        factor = 1.0
        for one in self._environment:
            if environment.get(one.name) == one.value and _span(communicator.n_nodes) in one.spans:
                if one.fails:
                    raise FabricError(f"{one.name}={one.value} does not work on {self.name}", "unset it")
                factor *= one.us_factor
        return factor

    @property
    def max_ranks(self) -> int:
        """Ranks that fit on the fabric."""
        return self.ranks_per_node * self.max_nodes

    @property
    def shape(self) -> str:
        """Its nodes and their ranks, in words."""
        return f"{counted(self.max_nodes, 'node')} of {counted(self.ranks_per_node, 'rank')}"

    def refuse_more(self, n_ranks: int) -> None:
        """Raise FabricError if this many ranks do not fit on the fabric."""
        if n_ranks > self.max_ranks:
            raise FabricError(f"fabric {self.name} has {self.shape}, too few for {n_ranks:,} ranks", _REMEDY)

    def with_nodes(self, max_nodes: int) -> Fabric:
        """This fabric with more nodes of the same kind; FabricError if the file describes no network."""
        if max_nodes > 1 and self.belief.many_nodes is None:
            raise FabricError(f"fabric {self.name} describes no network", "name a fabric of several nodes")
        larger = copy.copy(self)
        larger.max_nodes, larger._topologies = max_nodes, {}
        return larger

    def n_nodes(self, ranks: Sequence[int]) -> int:
        """Nodes that the global `ranks` of a communicator touch."""
        return len({rank // self.ranks_per_node for rank in ranks})

    def communicator(self, ranks: Sequence[int]) -> CommunicatorClass:
        """Class of the communicator of these global ranks."""
        return CommunicatorClass(len(ranks), self.n_nodes(ranks))

    def topology(self, communicator: CommunicatorClass) -> Topology:
        """The input of NCCL's cost model for `communicator`; FabricError if it does not fit on the fabric."""
        known = self._topologies.get(communicator)
        if known is not None:
            return known
        n_ranks, n_nodes = communicator.n_ranks, communicator.n_nodes
        if not (1 <= n_nodes <= min(n_ranks, self.max_nodes) and n_ranks <= n_nodes * self.ranks_per_node):
            raise FabricError(
                f"fabric {self.name} has {self.shape}, not {communicator}", _REMEDY
            )
        span = self._believed_span(n_nodes)
        terms = {name: getattr(span, name) for name in span.__struct_fields__}
        share = self._adapter_share(communicator)
        for name in _BELIEVED_RATES:
            terms[name] *= share
        terms["stated_cells"] = tuple(
            msgspec.structs.replace(cell, gbs=cell.gbs * share)
            for cell in span.stated_cells
            if n_ranks > n_nodes or Algorithm[cell.algorithm] not in _NVLS  # multicast works within a node only
        )
        topology = Topology(
            n_ranks=n_ranks,
            n_nodes=n_nodes,
            compute_capability=self.belief.compute_capability,
            type_intra=self.belief.type_intra,
            cpu_is_amd=self.belief.cpu_is_amd,
            nccl_version=self.belief.nccl_version,
            **terms,
        )
        self._topologies[communicator] = topology
        return topology

    def max_channels(self, communicator: CommunicatorClass) -> int:
        """Channels of a communicator; NCCL clamps every request to this number."""
        return self.topology(communicator).comm_channels

    def truth_us(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        algorithm: Algorithm | None,
        protocol: Protocol | None,
        n_channels: int,
        message_bytes: int,
    ) -> float:
        """True time of one collective alone on the fabric, without noise.

        Args:
            communicator: with one rank the collective is a copy on the device.
            algorithm: None, as `protocol`, for collectives without one (send, all_to_all ...).
            n_channels: requested channels; fewer run if the message is small, as in NCCL.

        Raises:
            FabricError: the fabric does not have the cell.
            ValueError: `n_channels` is below 1 or above the communicator's channels.
        """
        if communicator.n_ranks == 1:
            return self.compute.launch_us + self.compute.stream_us(2.0 * message_bytes)
        if algorithm is None or protocol is None:
            rate_gbs = self.truth.intra_gbs
            if communicator.n_nodes > 1:
                rate_gbs = min(rate_gbs, self.truth.inter_gbs / self.ranks_per_node)
            wire_bytes = message_bytes * wire_share(communicator, collective)
            return self.truth.point_to_point_us + wire_bytes / (1000.0 * rate_gbs)
        topology = self.topology(communicator)
        most = max(topology.comm_channels, topology.nvls_channels)
        if not 1 <= n_channels <= most:
            raise ValueError(f"n_channels {n_channels} is outside 1..{most} of fabric {self.name}")
        if algorithm is Algorithm.nvls:
            n_channels = min(n_channels, max(1, topology.nvls_channels))
        if self.truth.follows_belief:
            return self._believed_us(topology, collective, algorithm, protocol, n_channels, message_bytes)
        # The last channel counts by its share, so that durations rise with the bytes.
        n_filled = cost_model.channels_filled(collective, protocol, message_bytes, n_channels)
        curve = self._recorded.get((collective, algorithm, protocol))
        if curve is not None:
            factor = channel_factor(self.truth.recorded_channel_factors, n_filled)
            return curve.time_us(collective, communicator.n_ranks, message_bytes, factor)
        cell = self._cells.get((collective, algorithm, protocol, _span(communicator.n_nodes)))
        if cell is None:
            raise FabricError(
                f"fabric {self.name} has no {algorithm.name}/{protocol.name} for {collective.name} "
                f"on {communicator.n_nodes} nodes",
                "add a [[truth.cells]] entry or choose another cell",
            )
        fixed_us, us_per_byte = line(cell, communicator, collective, n_filled)
        return fixed_us + us_per_byte * message_bytes / self._adapter_share(communicator)

    def nccl_algo(self) -> str:
        """NCCL_ALGO without the multicast algorithms that have no durations in the file; empty: all are allowed."""
        excluded = [name for algorithm, name in _NVLS.items() if not self._has_times(algorithm)]
        return f"^{','.join(excluded)}" if excluded else ""

    def _has_times(self, algorithm: Algorithm) -> bool:
        if self.truth.follows_belief:
            spans = [span for span in (self.belief.one_node, self.belief.many_nodes) if span is not None]
            stated = {cell.algorithm for span in spans for cell in span.stated_cells}
            stated |= {Algorithm.nvls.name for span in spans if span.nvls_gbs > 0}
            return algorithm not in _NVLS or algorithm.name in stated
        return any(algorithm is timed for _, timed, *_ in (*self._cells, *self._recorded))

    def sms_slowdown(self, n_channels: int) -> float:
        """Factor >= 1 on the duration of computation while collectives use `n_channels` channels."""
        held = n_channels * self.contention.sms_per_channel / self.contention.n_sms
        return 1.0 / (1.0 - min(held, 0.9))

    def sharing_slowdown(self, n_collectives: int) -> float:
        """Factor >= 1 on the duration of each of `n_collectives` that overlap."""
        return 1.0 + self.contention.sharing * (max(n_collectives, 1) - 1)

    def memory_mb(self, communicator: CommunicatorClass, n_channels: Mapping[Algorithm, int]) -> float:
        """Device memory for connected algorithms, given the channels of each."""
        return sum(
            n * memory.n_neighbours(algorithm, communicator) * self.memory.channel_mb + self.memory.algorithm_mb
            for algorithm, n in n_channels.items()
        )

    def describe(self) -> dict[str, str | int | float | bool]:
        """The description for the store and for features; `emulated` marks all results from this fabric."""
        span = self._believed_span(1 if self.ranks_per_node > 1 else 2)
        return {
            "emulated": self.name,
            "fabric_id": self.fabric_id,
            "title": self.title,
            "source": self.source,
            "ranks_per_node": self.ranks_per_node,
            "max_nodes": self.max_nodes,
            "compute_capability": self.belief.compute_capability,
            "type_intra": self.belief.type_intra,
            "cpu_is_amd": self.belief.cpu_is_amd,
            "comm_channels": span.comm_channels,
            "adapters": self._adapters,
            "device_mb": self.memory.device_mb,
            "channel_mb": self.memory.channel_mb,
            "nccl_version": ".".join(map(str, catalog.NEWEST_MODELLED)),
        }

    def cells(self, communicator: CommunicatorClass, collective: Collective) -> tuple[catalog.Cell, ...]:
        """Cells that NCCL offers here: those that are not IGNORE in its cost table."""
        table = cost_model.cost_table(self.topology(communicator), collective, 1 << 20)
        return tuple((a, p) for a in Algorithm for p in Protocol if table[a, p] != IGNORE)

    def _believed_span(self, n_nodes: int) -> BelievedSpan:
        span = self.belief.one_node if n_nodes == 1 else self.belief.many_nodes
        # Only one span is described if all nodes have one rank, or if there is one node; it serves for both.
        span = span or self.belief.many_nodes or self.belief.one_node
        assert span is not None
        return span

    def _adapter_share(self, communicator: CommunicatorClass) -> float:
        """Share of a node's network adapters that the communicator's ranks use: each GPU has its own."""
        if communicator.n_nodes == 1:
            return 1.0
        return min(1.0, communicator.n_ranks / (communicator.n_nodes * self.ranks_per_node))

    def _believed_us(
        self,
        topology: Topology,
        collective: Collective,
        algorithm: Algorithm,
        protocol: Protocol,
        n_channels: int,
        message_bytes: int,
    ) -> float:
        """NCCL's own prediction; fewer channels than NCCL's default are never faster."""
        cost_us = float(cost_model.cost_us(topology, collective, algorithm, protocol, message_bytes))
        if cost_us < 0:
            raise FabricError(
                f"fabric {self.name} has no {algorithm.name}/{protocol.name} for {collective.name}",
                "choose a cell that the cost table offers",
            )
        default = cost_model.default_channels(topology, collective, algorithm, protocol, message_bytes)
        return cost_us * max(1.0, default / n_channels)


def _span(n_nodes: int) -> Literal["one_node", "many_nodes"]:
    span: Span = "one_node" if n_nodes == 1 else "many_nodes"
    return span
