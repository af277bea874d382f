"""NCCL's cost as the starting guess.

A *cost* is a prediction, never a measurement. The starting guess for a candidate is NCCL's cost of its cell, with the
bandwidth part scaled to the candidate's channels. NCCL's cost comes from the job's live cost table, else from the
fabric description's cost model, else from a generic latency-bandwidth line. `zerotune.tuner.modeling.correction` learns
the error of that guess.

`message_bytes` is NCCL's nBytes, the whole buffer. Arrays have the shape [n_bytes, n_candidates]; NaN: not available.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from ...agent.nccl import catalog, cost_model, fabric
from ...agent.nccl.cell_terms import Topology
from ...agent.nccl.fabric_model import Fabric
from ...store.errors import FabricError
from ...store.records import BASELINE, Algorithm, Candidate, Collective, CommunicatorClass, Protocol
from .features import DEFAULT_CELL, Floats, cell_of
from .undescribed import GENERIC_INTER_GBS, generic_cost, interpolated_cost

MANY_NODES: Final = 3
"""From this many nodes on NCCL's cost model has the same bandwidths."""
# Share of the channels that gives full bandwidth in the starting guess; NCCL over-provisions.
_SATURATING_SHARE = 0.6
_GENERIC_MAX_CHANNELS = 32
_MAX_LIVE_TABLES = 256


class CostPrior:
    """NCCL's own cost of every candidate on one fabric, with a guess at the effect of the channel count.

    `fabric_facts` is the description a rank sent in its Hello; `emulated` in it names a fabric file, whose
    *belief* is used (never its truth). A description without it gives the generic line until `learn_live`
    has seen a cost table.
    """

    def __init__(
        self,
        fabric_facts: Mapping[str, str | int | float | bool],
        described: Fabric | None = None,
        *,
        is_exact: bool = False,
    ) -> None:
        self._is_exact = is_exact
        self._fabric = described  # a hypothetical fabric, in place of the file that the facts name
        name = fabric_facts.get("emulated")
        if described is None and isinstance(name, str) and name:
            with suppress(FabricError):  # described by another machine's file: fall back to the generic line
                found = fabric.load(name)
                if fabric_facts.get("fabric_id", found.fabric_id) == found.fabric_id:  # not another of this name
                    self._fabric = found
        self._topologies: dict[CommunicatorClass, Topology | None] = {}
        self._live: dict[tuple[CommunicatorClass, Collective], dict[int, npt.NDArray[np.float32]]] = {}
        self._max_channels: dict[CommunicatorClass, int] = {}
        self._refused: dict[tuple[CommunicatorClass, Collective], set[tuple[int, int]]] = {}
        stated = fabric_facts.get("comm_channels")
        self._stated_channels = max(0, stated) if isinstance(stated, int) else 0
        self.revision = 0
        """Grows whenever something is learned: results of earlier revisions are out of date."""

    def learn_live(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        message_bytes: int,
        table: npt.NDArray[np.float32],
    ) -> bool:
        """Take over a cost table that NCCL handed to the plugin; returns whether it is new.

        It has microseconds by algorithm and protocol, shape [7, 3]; below zero: not available. Only so many are kept.
        """
        tables = self._live.setdefault((communicator, collective), {})
        if message_bytes in tables or len(tables) >= _MAX_LIVE_TABLES:
            return False
        tables[message_bytes] = np.array(table, np.float32)
        self.revision += 1
        return True

    def learn_channels(self, communicator: CommunicatorClass, n_channels: int) -> bool:
        """A collective ran on `n_channels`, so the communicator has as many. True if that changes the candidates."""
        before = self.max_channels(communicator)
        self._max_channels[communicator] = max(n_channels, self._max_channels.get(communicator, 0))
        is_new = self.max_channels(communicator) != before
        self.revision += is_new
        return is_new

    def learn_refused(self, communicator: CommunicatorClass, collective: Collective, cell: tuple[int, int]) -> None:
        """NCCL ran others than this requested algorithm and protocol: `cell` is no candidate from now on."""
        self._refused.setdefault((communicator, collective), set()).add(cell)
        self.revision += 1

    def max_channels(self, communicator: CommunicatorClass) -> int:
        """Most channels that may be requested: as described, or the most that ran."""
        if (topology := self._topology(communicator)) is not None:
            return max(1, min(topology.comm_channels, catalog.CHANNEL_LADDER[-1]))
        known = self._max_channels.get(communicator, 0) or self._stated_channels
        return min(known or _GENERIC_MAX_CHANNELS, catalog.CHANNEL_LADDER[-1])

    def leaves_alone(self, collective: Collective) -> bool:
        """Whether only NCCL may choose, since another setting could change a bit of the result."""
        return self._is_exact and collective in catalog.COMPUTING

    def candidates(self, communicator: CommunicatorClass, collective: Collective) -> tuple[Candidate, ...]:
        """The baseline and every candidate that may be requested; only the baseline if untunable."""
        if self.leaves_alone(collective):
            return (BASELINE,)
        cells = self._offered_cells(communicator, collective)
        if cells is None and not catalog.legal_cells(collective, n_nodes=communicator.n_nodes):
            return (BASELINE,)
        offered = catalog.candidates(collective, communicator, self.max_channels(communicator), cells=cells)
        refused = self._refused.get((communicator, collective))
        return tuple(one for one in offered if cell_of(one) not in refused) if refused else offered

    def default(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        message_bytes: int,
        *,
        described_only: bool = False,
    ) -> Candidate | None:
        """NCCL's own choice: the cheapest cell, with its channels; None if neither a table nor the topology is known.

        A live table does not show channels, which are then 0. With `described_only`, live tables are ignored, as the
        nearest one's choice belongs to its own size.
        """
        table = None if described_only else self._live_table(communicator, collective, message_bytes)
        if table is None:
            topology = self._topology(communicator)
            if topology is None:
                return None
            try:
                return cost_model.default_choice(topology, collective, message_bytes)
            except ValueError:
                return None
        costs = np.where(table < 0, np.inf, table)
        winner = int(np.argmin(costs))
        if not np.isfinite(costs.flat[winner]):
            return None
        return Candidate(Algorithm(winner // costs.shape[1]), Protocol(winner % costs.shape[1]), 0)

    def log_cost(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        message_bytes: npt.ArrayLike,
        *,
        described_only: bool = False,
        saturates: bool = True,
    ) -> Floats:
        """Natural log of the predicted microseconds.

        With `described_only`, live tables are ignored, as a correction fitted from the store never saw them. Unless it
        `saturates`, every channel adds as much bandwidth as the first.
        """
        latency_us, transfer_us = self._parts(
            communicator, collective, candidates, message_bytes, described_only, saturates
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            logs: Floats = np.log(latency_us + transfer_us)
        return logs

    def transfer_share(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        message_bytes: npt.ArrayLike,
    ) -> Floats:
        """Share of the predicted duration that is proportional to the bytes, 0 to 1."""
        latency_us, transfer_us = self._parts(communicator, collective, candidates, message_bytes)
        with np.errstate(invalid="ignore", divide="ignore"):
            share: Floats = transfer_us / (latency_us + transfer_us)
        return share

    def _parts(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        message_bytes: npt.ArrayLike,
        described_only: bool = False,
        saturates: bool = True,
    ) -> tuple[Floats, Floats]:
        """Microseconds independent of the bytes, and proportional to them."""
        sizes = np.atleast_1d(np.asarray(message_bytes, dtype=np.float64))
        lines: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        n_available = self.max_channels(communicator)
        latencies, transfers = np.empty((2, len(sizes), len(candidates)))
        for column, candidate in enumerate(candidates):
            cell = cell_of(candidate)
            if cell not in lines:
                lines[cell] = self._latency_and_transfer(communicator, collective, cell, sizes, described_only)
            latency_us, transfer_us = lines[cell]
            n_channels = candidate.n_channels or n_available
            factor = _SATURATING_SHARE * n_available / n_channels
            latencies[:, column] = latency_us
            transfers[:, column] = transfer_us * (max(1.0, factor) if saturates else factor)
        return latencies, transfers

    def log_jump(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        message_bytes: npt.ArrayLike,
    ) -> Floats:
        """How much higher `log_cost` is on few nodes than for as many ranks on three or more, without live tables.

        NCCL's cost model has other bandwidths on one node and on two. It is 0 on three nodes or more, or if nothing is
        known.
        """
        most = self._fabric.max_nodes if self._fabric is not None else communicator.n_ranks
        n_nodes = min(MANY_NODES, communicator.n_ranks, most)
        if communicator.n_nodes >= n_nodes:
            return np.zeros((len(np.atleast_1d(message_bytes)), len(candidates)))
        apart = CommunicatorClass(communicator.n_ranks, n_nodes)
        here, there = (
            self.log_cost(one, collective, candidates, message_bytes, described_only=True)
            for one in (communicator, apart)
        )
        jump: Floats = np.nan_to_num(here - there)
        return jump

    def log_idle(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        candidates: Sequence[Candidate],
        message_bytes: npt.ArrayLike,
    ) -> Floats:
        """How much lower `log_cost` would be if the last channels added as much as the first, without live tables."""
        some, every = (
            self.log_cost(communicator, collective, candidates, message_bytes, described_only=True, saturates=saturates)
            for saturates in (True, False)
        )
        idle: Floats = np.nan_to_num(some - every)
        return idle

    def _offered_cells(
        self, communicator: CommunicatorClass, collective: Collective
    ) -> tuple[tuple[Algorithm, Protocol], ...] | None:
        tables = self._live.get((communicator, collective))
        if tables:
            usable = np.all(np.stack(list(tables.values())) >= 0, axis=0)
        else:
            topology = self._topology(communicator)
            if topology is None:
                return None
            usable = cost_model.cost_table(topology, collective, 1 << 20) >= 0
        legal = catalog.legal_cells(
            collective, n_nodes=communicator.n_nodes, n_ranks=communicator.n_ranks, collnet=True
        )
        return tuple(cell for cell in legal if usable[cell])

    def _topology(self, communicator: CommunicatorClass) -> Topology | None:
        if self._fabric is None:
            return None
        if communicator not in self._topologies:
            try:
                self._topologies[communicator] = self._fabric.topology(communicator)
            except (FabricError, ValueError):
                self._topologies[communicator] = None
        return self._topologies[communicator]

    def _live_table(
        self, communicator: CommunicatorClass, collective: Collective, message_bytes: int
    ) -> npt.NDArray[np.float32] | None:
        tables = self._live.get((communicator, collective))
        if not tables:
            return None
        return tables[min(tables, key=lambda known: abs(np.log(known / max(message_bytes, 1))))]

    def _latency_and_transfer(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        cell: tuple[int, int],
        sizes: Floats,
        described_only: bool,
    ) -> tuple[Floats, Floats]:
        """Microseconds of `cell` as (independent of, proportional to) the bytes moved, each [n_bytes]."""
        if cell == DEFAULT_CELL:
            return self._cheapest_cell(communicator, collective, sizes, described_only)
        algorithm, protocol = Algorithm(cell[0]), Protocol(cell[1])
        tables = None if described_only else self._live.get((communicator, collective))
        topology = self._topology(communicator)
        if topology is not None:
            total = cost_model.cost_us(topology, collective, algorithm, protocol, sizes).astype(np.float64)
            nothing = cost_model.cost_us(topology, collective, algorithm, protocol, np.ones(1))
            latency = np.minimum(total, float(nothing[0]))
            total = np.where(total < 0, np.nan, total)
        elif tables:
            total = interpolated_cost(tables, cell, sizes)
            least = min(float(table[cell]) for table in tables.values())
            latency = np.minimum(total, np.maximum(least, 0.0) if least >= 0 else np.nan)
        else:
            latency, total = generic_cost(communicator, collective, algorithm, protocol, sizes)
        return latency, total - latency

    def _cheapest_cell(
        self,
        communicator: CommunicatorClass,
        collective: Collective,
        sizes: Floats,
        described_only: bool,
    ) -> tuple[Floats, Floats]:
        cells = self._offered_cells(communicator, collective)
        if cells is None:
            cells = catalog.legal_cells(
                collective, n_nodes=communicator.n_nodes, n_ranks=communicator.n_ranks, nvls=False
            )
        if not cells:
            return np.full(len(sizes), 10.0), sizes / (1000.0 * GENERIC_INTER_GBS)
        parts = [
            self._latency_and_transfer(communicator, collective, (int(a), int(p)), sizes, described_only)
            for a, p in cells
        ]
        totals = np.stack([latency + transfer for latency, transfer in parts])
        best = np.argmin(np.where(np.isnan(totals), np.inf, totals), axis=0)
        every = np.arange(len(sizes))
        latencies, transfers = np.stack([p[0] for p in parts]), np.stack([p[1] for p in parts])
        return latencies[best, every], transfers[best, every]
