"""Chooses the setting of a collective: by NCCL's model, NCCL_ALGO and NCCL_PROTO, the tuner plugin, NCCL's limits.

`message_bytes` is NCCL's nBytes, of all fused tasks; `zerotune.agent.nccl.cost_model` explains `n_pipe_ops`. `average`
also stands for a premultiplied sum: some algorithms support neither. `captured` calls become part of a CUDA graph.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

import msgspec
import numpy as np

from .....store.records import Algorithm, Candidate, Collective, CommunicatorClass, Protocol
from ... import catalog, cost_model, pinning
from ...cell_terms import N_ALGORITHMS, N_PROTOCOLS
from ...fabric_model import Fabric
from ..errors import EmulatedNcclError
from .plugin_host import CommunicatorPlugins, plugin_host

IGNORE: Final = cost_model.IGNORE
_N_CELLS: Final = N_ALGORITHMS * N_PROTOCOLS
_TABLE_BYTES: Final = _N_CELLS * 4
_Costs = Any  # ctypes.Array[c_float]: not subscriptable at run time, nor do its items read as float
_NEVER_WINS: Final = 3.6e9
"""NCCL before 2.29 never takes a cell with a higher cost."""
_NO_FALLBACK_SINCE: Final = (2, 24)
"""Older releases ran ring/simple if no cell was available."""
_ASKS_FOR_SYMMETRIC_SINCE: Final = (2, 29)
_EVERY_CELL: Final = frozenset((a, p) for a in Algorithm for p in Protocol)
_BEYOND_RCCL: Final = [a for a in Algorithm if a not in (Algorithm.tree, Algorithm.ring)]
_PIVOT: Final = 8
_PIVOT_SINCE_BYTES: Final = 744 << 10


class Chooser:
    """One communicator's decisions.

    Raises:
        FabricError: the communicator does not fit on the fabric.
        UserError: NCCL_ALGO or NCCL_PROTO has an unknown name.
    """

    def __init__(
        self, fabric: Fabric, communicator: CommunicatorClass, plugins: CommunicatorPlugins | None, n_channels: int
    ) -> None:
        self._communicator = communicator
        topology = fabric.topology(communicator)
        self._topology = msgspec.structs.replace(
            topology, comm_channels=n_channels, nvls_channels=min(topology.nvls_channels, n_channels)
        )
        self._release = plugin_host().release
        self._plugins = plugins if plugins is not None and plugins.has_tuner else None
        self._forbidden = {
            collective: _EVERY_CELL - pinning.allowed_cells(os.environ, collective) for collective in Collective
        }
        self._limit = _NEVER_WINS if self._release.version < (2, 29) else float("inf")
        self._costs: dict[tuple[Collective, int, bool, int], _Costs] = {}
        self._table: _Costs = (ctypes.c_float * _N_CELLS)()
        self._table_address = ctypes.addressof(self._table)
        self._candidates: dict[tuple[Collective, int, int, int], Candidate] = {}

    def choose(
        self, collective: Collective, message_bytes: int, average: bool, n_pipe_ops: int, captured: bool
    ) -> Candidate:
        """The setting of one collective, as NCCL and its tuner plugin choose it.

        Raises:
            EmulatedNcclError: the plugin failed, or no cell is available.
        """
        key = (collective, message_bytes, average, n_pipe_ops)
        costs = self._costs.get(key)
        if costs is None:
            if len(self._costs) > 4096:
                self._costs.clear()
            costs = self._costs[key] = self._filled(*key)
        if self._plugins is None:
            return self._cheapest(collective, message_bytes, costs, 0)
        ctypes.memmove(self._table_address, costs, _TABLE_BYTES)
        asked = self._ask(int(collective), message_bytes, n_pipe_ops, captured)
        if asked is None:
            return self._cheapest(collective, message_bytes, costs, 0)
        return self._cheapest(collective, message_bytes, self._table, asked)

    def ask_for_symmetric(
        self, collective: Collective, message_bytes: int, average: bool, n_pipe_ops: int, captured: bool
    ) -> None:
        """As `choose`: the symmetric scheduler of NCCL 2.29 and newer asks the plugin, too, but ignores the answer."""
        if self._release.version >= _ASKS_FOR_SYMMETRIC_SINCE:
            self.choose(collective, message_bytes, average, n_pipe_ops, captured)

    def ask_for_all_to_all(self, message_bytes: int) -> None:
        """RCCL asks its tuner for the "pivot" all_to_all, with a number that NCCL uses for another collective."""
        is_pivot = self._release.is_rccl and message_bytes >= _PIVOT_SINCE_BYTES * self._communicator.n_ranks
        if is_pivot and self._plugins is not None:
            self._table[:] = [IGNORE] * _N_CELLS
            self._ask(_PIVOT, message_bytes, 1, False)

    def _ask(self, function: int, message_bytes: int, n_pipe_ops: int, captured: bool) -> int | None:
        """Channels that the plugin asks for; None if it failed, which RCCL ignores."""
        assert self._plugins is not None
        nvls = self._topology.has_nvls
        try:
            return self._plugins.ask(function, message_bytes, n_pipe_ops, self._table_address, nvls, captured)
        except EmulatedNcclError:
            if self._release.is_rccl:
                return None
            raise

    def _filled(self, collective: Collective, message_bytes: int, average: bool, n_pipe_ops: int) -> _Costs:
        """NCCL's cost table before the plugin edits it."""
        table = np.array(cost_model.cost_table(self._topology, collective, message_bytes, n_pipe_ops), np.float32)
        if collective is Collective.reduce_scatter and average:
            table[Algorithm.nvls] = IGNORE
            if self._release.version < catalog.PAT_AVERAGES_SINCE:
                table[Algorithm.pat] = IGNORE
        table[self._release.n_algorithms :] = IGNORE
        if self._release.is_rccl:
            table[_BEYOND_RCCL] = IGNORE
        for algorithm, protocol in self._forbidden[collective]:
            table[algorithm, protocol] = IGNORE
        return (ctypes.c_float * _N_CELLS)(*table.ravel().tolist())

    def _cheapest(self, collective: Collective, message_bytes: int, costs: _Costs, asked: int) -> Candidate:
        winner = plugin_host().calls.cheapest(ctypes.addressof(costs), _N_CELLS, self._limit)
        key = (collective, message_bytes, winner, asked)
        known = self._candidates.get(key)
        if known is None:
            if winner < 0 and self._release.version < _NO_FALLBACK_SINCE:
                winner = Algorithm.ring * N_PROTOCOLS + Protocol.simple
            elif winner < 0:
                reason = (
                    "NCCL_ALGO and NCCL_PROTO leave none" if self._forbidden[collective] else "every cell is IGNORE"
                )
                raise EmulatedNcclError(f"no algorithm for {collective.name} of {message_bytes} bytes: {reason}")
            if len(self._candidates) > 8192:
                self._candidates.clear()
            known = self._candidates[key] = self._with_channels(collective, message_bytes, winner, asked)
        return known

    def _with_channels(self, collective: Collective, message_bytes: int, winner: int, asked: int) -> Candidate:
        algorithm, protocol = Algorithm(winner // N_PROTOCOLS), Protocol(winner % N_PROTOCOLS)
        if asked <= 0:
            n_channels = cost_model.default_channels(self._topology, collective, algorithm, protocol, message_bytes)
        else:
            most = self._topology.comm_channels
            if algorithm is Algorithm.nvls and self._communicator.n_nodes == 1:
                most = max(1, self._topology.nvls_channels)
            n_channels = cost_model.channels_used(collective, protocol, message_bytes, min(asked, most))
        return Candidate(algorithm, protocol, max(1, n_channels))
