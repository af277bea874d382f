"""One communicator's NCCL, as we know it: our cost model decides, the plugins are called in NCCL's order."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zerotune.agent.nccl.channel_limit import channel_limit
from zerotune.agent.nccl.emulated.host.calls import TUNED, Decision, FusedTasks, IssuedCall, Path
from zerotune.agent.nccl.emulated.host.model.chooser import Chooser
from zerotune.agent.nccl.emulated.host.model.events import ProfilerEvents
from zerotune.agent.nccl.emulated.host.model.plugin_host import CapturedGroup, CommunicatorPlugins, plugin_host
from zerotune.agent.nccl.emulated.host.nccl_host import NcclHost
from zerotune.agent.nccl.fabric import Fabric
from zerotune.agent.nccl.release import Release
from zerotune.store.records import BASELINE, Candidate, Collective, CommunicatorClass


class ModelHost(NcclHost):
    """See the module.

    Raises:
        EmulatedNcclError: a plugin refused the communicator.
        FabricError, UserError: the communicator does not fit on the fabric, or NCCL_ALGO and the like make no sense.
    """

    def __init__(self, fabric: Fabric, shape: CommunicatorClass, rank: int, comm_id: int, name: str) -> None:
        self._plugins = CommunicatorPlugins(comm_id, rank, shape.n_ranks, shape.n_nodes, name)
        self._events = ProfilerEvents(self._plugins, comm_id, rank)
        self.release: Release = plugin_host().release
        self.has_windows = self.release.has_symmetric_kernels
        self._n_channels = channel_limit(os.environ, fabric.max_channels(shape))
        self._chooser = Chooser(fabric, shape, self._plugins, self._n_channels) if shape.n_ranks > 1 else None

    def decide(self, fused_groups: Sequence[FusedTasks], n_tasks: int, *, captured: bool) -> list[Decision]:
        """See NcclHost."""
        wanted = self._chooser is not None and self._events.are_wanted
        return [Decision(self._candidate(fused, n_tasks, captured), wants_events=wanted) for fused in fused_groups]

    def _candidate(self, fused: FusedTasks, n_tasks: int, captured: bool) -> Candidate:
        if self._chooser is None or fused.message_bytes == 0:
            return BASELINE
        if fused.collective not in TUNED:
            if fused.collective is Collective.all_to_all:
                self._chooser.mention_all_to_all(fused.message_bytes)
            return BASELINE
        asked = fused.collective, fused.message_bytes, fused.op.is_scaled, -(-n_tasks // self._n_channels), captured
        if fused.path is Path.kernel:
            return self._chooser.choose(*asked)
        if fused.path is Path.symmetric:
            self._chooser.mention_symmetric(*asked)
        return BASELINE

    def enqueued(self, calls: Sequence[IssuedCall], captured: CapturedGroup | None = None) -> None:
        """See NcclHost."""
        self._events.enqueued(calls, captured)

    def begin_capture(self, decided: Sequence[tuple[FusedTasks, Candidate]]) -> CapturedGroup | None:
        """See NcclHost."""
        return self._events.begin_capture(decided)

    def ran(self, call: IssuedCall, start_us: float, end_us: float) -> None:
        """See NcclHost."""
        self._events.ran(call, start_us, end_us)

    def close(self, *, failed: bool) -> None:
        """See NcclHost."""
        self._plugins.finalize()
