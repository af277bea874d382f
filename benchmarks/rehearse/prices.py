"""What a collective takes, by the fabric's truth and what NCCL launched."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

from benchmarks.rehearse.device_functions import DeviceFunction
from zerotune.agent.nccl.fabric_model import Fabric
from zerotune.store.errors import FabricError
from zerotune.store.records import Collective, CommunicatorClass

MESSAGES: Final = 0xFFFFFFFF
"""Function number of messages between ranks, as in collectives.c."""
_IN_BYTES: Final = frozenset({Collective.all_gather, Collective.broadcast})
"""NCCL turns these into collectives of bytes."""
_SHARDED: Final = frozenset({Collective.all_gather, Collective.reduce_scatter})
"""Their counts are of one rank."""


class Prices:
    """Microseconds on a fabric, times `slower`; never raises, since NCCL's launches ask."""

    def __init__(self, fabric: Fabric, functions: Mapping[int, DeviceFunction], slower: float) -> None:
        self._fabric, self._functions, self._slower = fabric, functions, slower

    def __call__(
        self, n_ranks: int, n_nodes: int, function: int, n_channels: int, count: int, element_bytes: int
    ) -> float:
        """Price one collective.

        Args:
            n_ranks: of its communicator.
            n_nodes: that they are on.
            function: NCCL's number of the device function, or MESSAGES.
            n_channels: that were launched.
            count: as the kernel has it.
            element_bytes: of the call's type.

        Returns:
            Microseconds.
        """
        try:
            communicator = CommunicatorClass(n_ranks, n_nodes)
            return self._slower * self._us(communicator, function, n_channels, count, element_bytes)
        except Exception as error:
            print(
                f"zerotune: the fabric {self._fabric.name} has no price for what NCCL launched: {error}",
                file=sys.stderr,
            )
            return 0.0

    def _us(
        self, communicator: CommunicatorClass, function: int, n_channels: int, count: int, element_bytes: int
    ) -> float:
        if function == MESSAGES:
            return self._fabric.truth_us(communicator, Collective.send, None, None, 1, max(count, 1))
        what = self._functions.get(function)
        if what is None:
            raise FabricError(f"device function {function} is not known", "name an older release")
        n_bytes = count * (1 if what.collective in _IN_BYTES else element_bytes)
        n_bytes *= communicator.n_ranks if what.collective in _SHARDED else 1
        most = self._fabric.max_channels(communicator)
        return self._fabric.truth_us(
            communicator, what.collective, what.algorithm, what.protocol, max(1, min(n_channels, most)), n_bytes
        )
