"""One emulated communicator on one rank: decides, publishes, joins, and keeps the virtual stream.

A call is *issued* without waiting for anybody: the setting is chosen, the plugin consulted, a header and the
payload published. It is *completed*, in order, at a synchronising point: all headers are awaited and compared,
the virtual start and end follow from them alike on all ranks, and the results are copied out.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from agent.nccl.emulated import clock, faults
from agent.nccl.emulated.chooser import Chooser
from agent.nccl.emulated.errors import CallMismatch, EmulatedNcclError, SettingDisagreement
from agent.nccl.emulated.journal import JournalCall, journal
from agent.nccl.emulated.memory import CommunicatorMemory
from agent.nccl.emulated.plugin_host import CollectiveEvent, CommunicatorPlugins
from agent.nccl.emulated.rendezvous import Header, Rendezvous
from agent.nccl.emulated.settings import Emulation
from store.records import BASELINE, Algorithm, Candidate, Collective, Protocol

NONE: Final = 255
TUNED: Final = frozenset(
    {Collective.broadcast, Collective.reduce, Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce}
)
_NCCL_NAMES: Final = {
    Collective.broadcast: b"Broadcast",
    Collective.reduce: b"Reduce",
    Collective.all_gather: b"AllGather",
    Collective.reduce_scatter: b"ReduceScatter",
    Collective.all_reduce: b"AllReduce",
}
_ALGORITHM_NAMES: Final = {
    Algorithm.tree: b"TREE",
    Algorithm.ring: b"RING",
    Algorithm.collnet_direct: b"COLLNET_DIRECT",
    Algorithm.collnet_chain: b"COLLNET_CHAIN",
    Algorithm.nvls: b"NVLS",
    Algorithm.nvls_tree: b"NVLS_TREE",
    Algorithm.pat: b"PAT",
}
_PROTOCOL_NAMES: Final = {Protocol.ll: b"LL", Protocol.ll128: b"LL128", Protocol.simple: b"SIMPLE"}

# ncclDataType_t; NCCL has no more than these.
_DATATYPES: Final = {
    torch.int8: (0, b"ncclInt8"),
    torch.uint8: (1, b"ncclUint8"),
    torch.bool: (1, b"ncclUint8"),
    torch.int32: (2, b"ncclInt32"),
    torch.int64: (4, b"ncclInt64"),
    torch.float16: (6, b"ncclFloat16"),
    torch.float32: (7, b"ncclFloat32"),
    torch.float64: (8, b"ncclFloat64"),
    torch.bfloat16: (9, b"ncclBfloat16"),
}
_BYTES: Final = (NONE, b"ncclInt8")


Finish = Callable[["Call", int], None]


@dataclass(slots=True)
class Task:
    """One collective of a group: what this rank sends, and what to do with what all ranks sent."""

    piece: torch.Tensor | None
    """Contiguous CPU tensor, copied at issue; None = nothing to send."""
    message_bytes: int
    """Total, NCCL's nBytes."""
    count: int
    """NCCL's count argument."""
    finish: Finish | None
    """Called with the call and this task's piece number once every rank's data is there."""
    output: torch.Tensor | None = None
    """The tensor that the caller sees filled."""


@dataclass(slots=True, eq=False)
class Call:
    """An issued collective (or a fused run of several)."""

    communicator: Communicator
    index: int
    collective: Collective
    tasks: Sequence[Task]
    message_bytes: int
    own_arrival_us: float
    candidate: Candidate = BASELINE
    duration_us: float = 0.0
    """Alone on the links, with noise; alike on all ranks."""
    events: list[int] = field(default_factory=list)
    """The profiler's handles of events that wait for the kernel."""
    end_us: float | None = None
    error: BaseException | None = None

    @property
    def rendezvous(self) -> Rendezvous:
        """Where all ranks' payloads are while the call completes."""
        return self.communicator.rendezvous


class Communicator:
    """See the module. Blocks in the constructor until the first rank has made the meeting place.

    Raises:
        FabricError, EmulatedNcclError: it cannot be made.
    """

    def __init__(
        self, emulation: Emulation, store: dist.Store, name: str, rank: int, ranks: Sequence[int], timeout: timedelta
    ) -> None:
        fabric = emulation.fabric
        self.rank, self.n_ranks = rank, len(ranks)
        self._global_rank = ranks[rank]
        self.timeout_us = int(timeout.total_seconds() * 1e6)
        self._emulation = emulation
        self._fabric = fabric
        self._shape = fabric.communicator(ranks)
        incarnation = _incarnations[name]
        _incarnations[name] += 1
        label = f"{name}/{incarnation}/{','.join(map(str, ranks))}"
        self.comm_id = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little") or 1
        self.rendezvous = Rendezvous(store, f"emulated_nccl/{incarnation}", rank, self.n_ranks, timeout)
        self._plugins = CommunicatorPlugins(self.comm_id, rank, self.n_ranks, self._shape.n_nodes, name)
        self._chooser = Chooser(fabric, self._shape, self._plugins) if self.n_ranks > 1 else None
        self._n_channels = fabric.max_channels(self._shape)
        self._memory = CommunicatorMemory(fabric, self._shape, self._n_channels)
        self._header = Header()
        self._event = CollectiveEvent(rank=rank, comm_id=self.comm_id, n_warps=16)
        self._pending: deque[Call] = deque()
        self._issuing, self._completing = threading.RLock(), threading.RLock()
        self._stream_end_us = 0.0
        self._own_end_us = 0.0
        self._n_issued = 0
        self._sequences = [0] * 8
        self._truths: dict[tuple[Collective, int, Candidate], float] = {}
        self._failure: BaseException | None = None
        _communicators.append(self)

    def issue(
        self,
        collective: Collective,
        tasks: Sequence[Task],
        dtype: torch.dtype,
        *,
        redop: int = 0,
        average: bool = False,
        root: int = -1,
        even: bool = True,
        n_tasks: int = 1,
        captured: bool = False,
    ) -> Call:
        """Publish one collective, or one fused run of several of a kind; does not wait for other ranks.

        Raises:
            EmulatedNcclError: the communicator has failed, the plugin failed the call, or it cannot be run.
        """
        with self._issuing:
            if self._failure is not None:
                raise EmulatedNcclError(f"this communicator has failed: {self._failure}") from self._failure
            current = clock.current()
            index = self._n_issued
            self._n_issued += 1
            arrival_us = current.arrival_us() + self._fabric.noise.skew_us(
                self._emulation.seed, self.comm_id, index, self.rank
            )
            message_bytes = sum(task.message_bytes for task in tasks)
            call = Call(self, index, collective, tasks, message_bytes, arrival_us)
            is_tuned = collective in TUNED and message_bytes > 0 and self._chooser is not None
            error: Exception | None = None
            if is_tuned:
                try:
                    call.candidate = self._choose(call, average, n_tasks, captured)
                except (EmulatedNcclError, RuntimeError) as failure:
                    error = failure
            call.duration_us = self._duration_us(call, is_tuned and error is None)
            self._publish(call, dtype, redop, root, even, error is not None)
            if error is not None:
                self._failure = error
                raise error
            if is_tuned and self._plugins.wants_events:
                self._enqueue_events(call, dtype, root)
            self._pending.append(call)
            current.skip_cpu()
            return call

    def _choose(self, call: Call, average: bool, n_tasks: int, captured: bool) -> Candidate:
        assert self._chooser is not None
        n_pipe_ops = -(-n_tasks // self._n_channels)
        candidate = self._chooser.choose(
            call.collective, call.message_bytes, average=average, n_pipe_ops=n_pipe_ops, captured=captured
        )
        candidate = faults.forced(candidate, self._global_rank)
        faults.check(candidate)
        self._memory.connect(candidate.algorithm, candidate.n_channels)
        return candidate

    def _duration_us(self, call: Call, is_tuned: bool) -> float:
        key = (call.collective, call.message_bytes, call.candidate)
        truth_us = self._truths.get(key)
        if truth_us is None:
            chosen = call.candidate if is_tuned else BASELINE
            truth_us = self._truths[key] = self._fabric.truth_us(
                self._shape, call.collective, chosen.algorithm, chosen.protocol,
                max(1, chosen.n_channels), call.message_bytes,
            )  # fmt: skip
        algorithm, protocol = call.candidate.algorithm, call.candidate.protocol
        return truth_us * self._fabric.noise.factor(
            self._emulation.seed, self.comm_id, call.index,
            -1 if algorithm is None else int(algorithm), -1 if protocol is None else int(protocol),
            call.candidate.n_channels,
        )  # fmt: skip

    def _publish(self, call: Call, dtype: torch.dtype, redop: int, root: int, even: bool, failed: bool) -> None:
        candidate, header = call.candidate, self._header
        start_us = max(call.own_arrival_us, self._own_end_us)
        overlap_us = max(
            (
                min(other._own_end_us - start_us, call.duration_us)
                for other in _communicators
                if other.comm_id != self.comm_id
            ),
            default=0.0,
        )
        contention = 0.0
        if overlap_us > 0:
            contention = (self._fabric.sharing_slowdown(2) - 1.0) * overlap_us / call.duration_us
        self._own_end_us = start_us + call.duration_us * (1.0 + contention)
        clock.current().hold(start_us, self._own_end_us, candidate.n_channels)
        header.message_bytes = call.message_bytes
        header.n_elements = call.tasks[0].count
        header.arrival_us, header.contention = call.own_arrival_us, contention
        header.root, header.collective = root, call.collective
        header.datatype, header.redop = _DATATYPES.get(dtype, _BYTES)[0], redop
        header.algorithm = NONE if candidate.algorithm is None else candidate.algorithm
        header.protocol = NONE if candidate.protocol is None else candidate.protocol
        header.n_channels, header.failed, header.even = candidate.n_channels, failed, even
        pieces = [_EMPTY if task.piece is None else task.piece for task in call.tasks]
        while True:
            if self.rendezvous.publish(header, pieces) >= 0:
                return
            # The ring or the arena is full: finish own calls, then wait for the slowest rank to do so.
            if self._pending:
                oldest = self._pending[0]
                self.complete(self._pending[len(self._pending) // 2])
                self.rendezvous.wait_consumed(oldest.index, self.timeout_us)
            else:
                self.rendezvous.wait_consumed(call.index - 1, self.timeout_us)

    def _enqueue_events(self, call: Call, dtype: torch.dtype, root: int) -> None:
        event, candidate = self._event, call.candidate
        assert candidate.algorithm is not None
        assert candidate.protocol is not None
        datatype = _DATATYPES.get(dtype, _BYTES)
        event.collective = _NCCL_NAMES[call.collective]
        event.function, event.root = call.collective, max(root, 0)
        event.datatype_code, event.datatype = datatype
        event.algorithm_code, event.algorithm = candidate.algorithm, _ALGORITHM_NAMES[candidate.algorithm]
        event.protocol_code, event.protocol = candidate.protocol, _PROTOCOL_NAMES[candidate.protocol]
        event.n_channels = candidate.n_channels
        for task in call.tasks:
            event.sequence = self._sequences[call.collective]
            self._sequences[call.collective] += 1
            event.count, event.traffic_bytes = task.count, task.message_bytes
            handle = self._plugins.enqueued(event)
            if handle is not None:
                call.events.append(handle)

    def complete(self, call: Call, timeout_us: int | None = None) -> float:
        """Finish everything up to `call`; its virtual end. May block; any thread.

        Raises:
            SettingDisagreement, CallMismatch, PeerLost, CollectiveTimeout, EmulatedNcclError: as they say,
                on every rank that still runs.
        """
        if call.end_us is None:
            with self._completing:
                while call.end_us is None and call.error is None:
                    self._complete_oldest(self._pending[0], self.timeout_us if timeout_us is None else timeout_us)
        if call.error is not None:
            raise call.error
        assert call.end_us is not None
        return call.end_us

    def is_ready(self, call: Call) -> bool:
        """Whether `complete` would not block."""
        return call.end_us is not None or call.error is not None or self.rendezvous.is_ready(call.index)

    def _complete_oldest(self, call: Call, timeout_us: int) -> None:
        try:
            if self._failure is not None:
                raise EmulatedNcclError(f"this communicator has failed: {self._failure}") from self._failure
            self.rendezvous.wait(call.index, timeout_us)
            joined = self.rendezvous.join(call.index)
            if joined.failed_rank >= 0 or joined.call_rank >= 0 or joined.setting_rank >= 0:
                raise self._explain(call.index, joined.failed_rank, joined.call_rank, joined.setting_rank)
            if faults.hangs(call.candidate):
                self.rendezvous.wait(call.index + 10**9, timeout_us)
            previous_end_us = self._stream_end_us
            start_us = max(joined.arrival_us, previous_end_us)
            if joined.message_bytes != call.message_bytes:  # uneven all_to_all: the largest share counts
                call.message_bytes = joined.message_bytes
                call.duration_us = self._duration_us(call, is_tuned=False)
            self._stream_end_us = end_us = start_us + call.duration_us * (1.0 + joined.contention)
            for piece, task in enumerate(call.tasks):
                if task.finish is not None:
                    task.finish(call, piece)
            self.rendezvous.consume(call.index)
            began_us = max(call.own_arrival_us, previous_end_us)
            for handle in call.events:
                self._plugins.ran(handle, call.candidate.n_channels, began_us, end_us)
            self._record(call, start_us, end_us)
            call.end_us = end_us
        except BaseException as error:
            call.error = error
            self._failure = self._failure or error
            raise
        finally:
            self._pending.popleft()

    def _explain(self, index: int, failed_rank: int, call_rank: int, setting_rank: int) -> EmulatedNcclError:
        """The error that all ranks raise."""
        if failed_rank >= 0:
            return EmulatedNcclError(f"rank {failed_rank} failed collective {index} of this communicator")
        if call_rank >= 0:
            first, other = (_describe_call(self.rendezvous.peek(index, rank)) for rank in (0, call_rank))
            return CallMismatch(f"collective {index}: rank 0 called {first}, rank {call_rank} called {other}")
        journal().n_disagreements += 1
        first, other = (_describe_setting(self.rendezvous.peek(index, rank)) for rank in (0, setting_rank))
        header = self.rendezvous.peek(index, 0)
        return SettingDisagreement(
            f"collective {index} ({_describe_call(header)}): rank 0 runs {first}, rank {setting_rank} runs {other}; "
            "the real NCCL would hang"
        )

    def _record(self, call: Call, start_us: float, end_us: float) -> None:
        record = journal()
        record.n_calls += 1
        if call.candidate is not BASELINE:
            record.counts[call.collective, call.message_bytes, call.candidate] += 1
        if record.keep_calls:
            record.calls.append(
                JournalCall(
                    self.comm_id, call.index, call.collective, call.message_bytes, call.candidate, start_us, end_us
                )
            )

    def close(self) -> None:
        """Destroy the communicator."""
        if self in _communicators:
            _communicators.remove(self)
            self._plugins.finalize()
            self._memory.release()
            self.rendezvous.abort()
            with self._issuing, self._completing:  # whoever waits is woken by the abort
                self.rendezvous.close()


def _describe_call(header: Header) -> str:
    return f"{Collective(header.collective).name} of {header.message_bytes} bytes, {header.n_elements} per rank"


def _describe_setting(header: Header) -> str:
    if header.algorithm == NONE:
        return "no setting"
    return str(Candidate(Algorithm(header.algorithm), Protocol(header.protocol), header.n_channels))


_EMPTY: Final = torch.empty(0, dtype=torch.uint8)
_communicators: list[Communicator] = []
_incarnations: Counter[str] = Counter()
