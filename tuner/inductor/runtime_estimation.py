"""torch inductor's `custom_runtime_estimation`: measured times if there are any, else torch's own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...store.errors import StoreError
from ...store.paths import default_store_path
from ...store.records import CommunicatorClass
from .collective_nodes import collective_of
from .measured_times import MeasuredTimes

if TYPE_CHECKING:
    import torch.fx

logger = logging.getLogger("zerotune.inductor")
US_PER_MS: Final = 1000.0


class RuntimeEstimation:
    """Called by inductor's overlap scheduling with each node of a graph; never raises.

    It can be pickled and is equal on all ranks, as it is part of the keys of inductor's cache.

    Args:
        ranks_per_node: 0: all ranks are on one node.
    """

    def __init__(self, times: MeasuredTimes, ranks_per_node: int = 0) -> None:
        self.times = times
        self.ranks_per_node = ranks_per_node

    def __call__(self, node: torch.fx.Node, override_size: int | None = None) -> float | None:
        """Milliseconds of the collective that `node` starts.

        None makes torch use its own estimate. It is returned for other nodes, for unmeasured collectives, and if torch
        asks for another size. (It asks for 0, the latency; that convention differs among its callers.)
        """
        if override_size is not None:
            return None
        try:
            found = collective_of(node)
            if found is None:
                return None
            n_nodes = len({rank // self.ranks_per_node for rank in found.ranks}) if self.ranks_per_node else 1
            place = CommunicatorClass(len(found.ranks), n_nodes)
            us = self.times.us(found.collective, place, found.message_bytes)
        except Exception as error:
            logger.warning("zerotune: no time for %s: %s", node, error)
            return None
        return None if us is None else us / US_PER_MS


def runtime_estimation(store: Path | str | None = None, fabric_id: str | None = None) -> RuntimeEstimation:
    """Measured times of this job's collectives, for `aten_distributed_optimizations.custom_runtime_estimation`.

    All ranks must call it, after `init_process_group` and before the first compilation. Rank 0 reads the store and
    sends the times to the others: ranks with different times would call collectives in different orders, and hang.

    Never raises: without a store, or without measurements on this hardware, torch uses its own estimates.

    Args:
        store: the daemon's store; None: `ZEROTUNE_STORE`, or the default. Only rank 0's argument counts.
        fabric_id: fabric of the measurements; None: the hardware that this job runs on.
    """
    try:
        return _agreed(store, fabric_id)
    except Exception as error:
        logger.warning("zerotune: inductor plans with its own estimates: %s", error)
        return RuntimeEstimation(MeasuredTimes())


def _agreed(store: Path | str | None, fabric_id: str | None) -> RuntimeEstimation:
    import torch
    import torch.distributed as dist

    times, ranks_per_node = MeasuredTimes(), 0
    if dist.get_rank() == 0:
        times, ranks_per_node = _read(store, fabric_id)
    packed = times.pack()
    # Send bytes: objects would be pickled.
    device = torch.device("cpu" if "cpu:" in str(dist.get_backend_config()) else "cuda")
    heading = torch.tensor([len(packed), ranks_per_node], dtype=torch.int64, device=device)
    dist.broadcast(heading, src=0)
    n_bytes, ranks_per_node = (int(one) for one in heading.tolist())
    body = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        body.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
    dist.broadcast(body, src=0)
    return RuntimeEstimation(MeasuredTimes.unpack(bytes(body.cpu().tolist())), ranks_per_node)


def _read(store: Path | str | None, fabric_id: str | None) -> tuple[MeasuredTimes, int]:
    """Rank 0's times; empty instead of an error, since the other ranks wait for it."""
    try:
        import torch.distributed as dist

        from ...agent.machine import identity
        from ...agent.settings import AgentSettings

        is_emulated = dist.get_backend() == "emulated_nccl"
        found, facts = identity.describe(AgentSettings.from_environment().fabric if is_emulated else None)
        ranks_per_node = int(facts.get("ranks_per_node") or facts.get("n_ranks_per_node") or 0)
        times = MeasuredTimes.of_store(store or default_store_path(), fabric_id or found)
        if not times.curves:
            logger.warning("zerotune: inductor plans with its own estimates: nothing was measured on this hardware yet")
        return times, ranks_per_node
    except StoreError as error:
        logger.warning("zerotune: inductor plans with its own estimates: %s", error)
    except Exception as error:
        logger.warning("zerotune: inductor plans with its own estimates: %r", error)
    return MeasuredTimes(), 0
