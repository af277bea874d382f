"""Reports one communicator's collectives to the profiler, with NCCL's names and in its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .....store.records import Algorithm, Candidate, Collective, Protocol
from .calls import NO_SETTING, TUNED, FusedTasks, IssuedCall, Path, Task
from .datatypes import BYTES, DATATYPES
from .plugin_host import CapturedGroup, CollectiveEvent, CommunicatorPlugins

_COLLECTIVES: Final = {
    Collective.broadcast: b"Broadcast",
    Collective.reduce: b"Reduce",
    Collective.all_gather: b"AllGather",
    Collective.reduce_scatter: b"ReduceScatter",
    Collective.all_reduce: b"AllReduce",
}
_ALGORITHMS: Final = {
    Algorithm.tree: b"TREE",
    Algorithm.ring: b"RING",
    Algorithm.collnet_direct: b"COLLNET_DIRECT",
    Algorithm.collnet_chain: b"COLLNET_CHAIN",
    Algorithm.nvls: b"NVLS",
    Algorithm.nvls_tree: b"NVLS_TREE",
    Algorithm.pat: b"PAT",
}
_PROTOCOLS: Final = {Protocol.ll: b"LL", Protocol.ll128: b"LL128", Protocol.simple: b"SIMPLE"}
_NO_NAME: Final = b"Unknown"


class ProfilerEvents:
    """One communicator's events."""

    def __init__(self, plugins: CommunicatorPlugins, comm_id: int, rank: int) -> None:
        self._plugins = plugins
        self._comm_id, self._rank = comm_id, rank
        self._event = self._new_event()
        self._sequences = dict.fromkeys(_COLLECTIVES, 0)

    def enqueued(
        self, calls: Sequence[IssuedCall], captured: CapturedGroup | None = None, *, are_wanted: bool
    ) -> None:
        """One group was issued; called once for all its calls.

        Calls are numbered even if the profiler does not want events. For a replayed graph (`captured`) the profiler
        decided at the capture whether it wants events.
        """
        kernels = [call for call in calls if call.fused.collective in TUNED and call.fused.path is not Path.copy_engine]
        tasks = [(call, task) for call in kernels if call.message_bytes for task in call.fused.tasks]
        if not tasks or not (are_wanted or captured is not None):
            for call, _ in tasks:
                self._sequences[call.fused.collective] += 1
            return
        events = []
        for call, task in tasks:
            event = self._event if len(tasks) == 1 else self._new_event()
            self._fill(event, call.fused, task, call.candidate)
            events.append(event)
            self._sequences[call.fused.collective] += 1
        for (call, _), handle in zip(tasks, self._plugins.enqueued(events, captured), strict=True):
            if handle is not None:
                call.events.append(handle)

    def begin_capture(self, fused_groups: Sequence[tuple[FusedTasks, Candidate]]) -> CapturedGroup | None:
        """A graph captures one group; None: the profiler wants no events of it, now and at replays."""
        kernels = [
            each for each in fused_groups if each[0].collective in TUNED and each[0].path is not Path.copy_engine
        ]
        tasks = [
            (fused, task, candidate) for fused, candidate in kernels if fused.message_bytes for task in fused.tasks
        ]
        if not tasks or not self._plugins.wants_events:
            return None
        events = []
        for fused, task, candidate in tasks:
            event = self._new_event()
            self._fill(event, fused, task, candidate)
            events.append(event)
        return self._plugins.begin_capture(events)

    def ran(self, call: IssuedCall, start_us: float, end_us: float) -> None:
        """Report when a call's kernel ran, if the profiler wants events of the call."""
        for handle in call.events:
            self._plugins.ran(handle, call.candidate.n_channels, start_us, end_us)

    def _new_event(self) -> CollectiveEvent:
        return CollectiveEvent(rank=self._rank, comm_id=self._comm_id, n_warps=16)

    def _fill(self, event: CollectiveEvent, fused: FusedTasks, task: Task, candidate: Candidate) -> None:
        algorithm, protocol = candidate.algorithm, candidate.protocol
        event.collective, event.function = _COLLECTIVES[fused.collective], fused.collective
        event.datatype_code, event.datatype = DATATYPES.get(fused.dtype, BYTES)
        if algorithm is None or protocol is None:
            event.algorithm_code, event.algorithm = NO_SETTING, _NO_NAME
            event.protocol_code, event.protocol = NO_SETTING, _NO_NAME
        else:
            event.algorithm_code, event.algorithm = algorithm, _ALGORITHMS[algorithm]
            event.protocol_code, event.protocol = protocol, _PROTOCOLS[protocol]
        event.is_symmetric = fused.path is Path.symmetric
        event.root, event.n_channels = max(fused.root, 0), candidate.n_channels
        event.sequence = self._sequences[fused.collective]
        event.count, event.traffic_bytes = task.count, task.message_bytes
