"""One emulated communicator on one rank: chooses settings, publishes and joins calls, and keeps the virtual stream.

A call is *issued* without waiting for other ranks: its setting is chosen, with the plugin, and its header and payload
are published. Calls are *completed* in order, when a script waits for one: all ranks' headers are awaited and compared.
The virtual start and end follow from the headers, equal on all ranks, and the results are copied.

The tasks of one `FusedTasks` share a setting. Methods on a group return one call, or one setting, for each. They raise
`EmulatedNcclError` if the communicator has failed, the plugin fails a call, or a call cannot run.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from .....store.records import BASELINE, Algorithm, Candidate, Collective, Protocol
from ...channel_limit import channel_limit
from .. import faults
from ..device import clock
from ..device.memory import CommunicatorMemory
from ..errors import CallMismatch, EmulatedNcclError, SettingDisagreement
from ..journal import JournalCall, journal
from ..settings import Emulation
from ..transport.rendezvous import Header, Rendezvous
from .calls import NO_SETTING, TUNED, FusedTasks, IssuedCall, Path
from .chooser import Chooser
from .datatypes import BYTES, DATATYPES
from .events import ProfilerEvents
from .plugin_host import CapturedGroup, CommunicatorPlugins, plugin_host
from .registered_buffers import RegisteredBuffers


class Communicator:
    """See the module. The constructor waits until the first rank has made the shared memory.

    Raises:
        FabricError, UserError: it does not fit on the fabric, or NCCL_ALGO or another variable is malformed.
        EmulatedNcclError: it cannot be made, or a plugin refused it.
    """

    def __init__(
        self,
        emulation: Emulation,
        store: dist.Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        max_ctas: int | None = None,
    ) -> None:
        fabric = emulation.fabric
        self.rank, self.n_ranks = rank, len(ranks)
        self._global_rank = ranks[rank]
        self.timeout_us = int(timeout.total_seconds() * 1e6)
        self._emulation = emulation
        self._fabric = fabric
        self._shape = fabric.communicator(ranks)
        incarnation = incarnations[(name, *ranks)]  # by ranks, too: this rank may not know other groups of this name
        incarnations[(name, *ranks)] += 1
        label = f"{name}/{incarnation}/{','.join(map(str, ranks))}"
        self.comm_id = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little") or 1
        self.rendezvous = Rendezvous(store, f"emulated_nccl/{incarnation}", rank, self.n_ranks, timeout)
        self._plugins = CommunicatorPlugins(self.comm_id, rank, self.n_ranks, self._shape.n_nodes, name)
        self._events = ProfilerEvents(self._plugins, self.comm_id, rank)
        self.release: Final = plugin_host().release
        self._n_channels = channel_limit(os.environ, fabric.max_channels(self._shape), max_ctas)
        self._chooser = Chooser(fabric, self._shape, self._plugins, self._n_channels) if self.n_ranks > 1 else None
        self._memory = CommunicatorMemory(fabric, self._shape, self._n_channels)
        self._header = Header()
        self.registered_buffers = RegisteredBuffers(self.release, self._shape)
        self._pending: deque[IssuedCall] = deque()
        self._issuing, self._completing = threading.RLock(), threading.RLock()
        self._stream_end_us = 0.0
        self._own_end_us = 0.0
        self._n_issued = 0
        self._us_factor = fabric.us_factor(self._shape, os.environ)
        self._truths: dict[tuple[Collective, int, Candidate], float] = {}
        self._failure: BaseException | None = None
        if self.n_ranks > 1 and not self.release.connects_at_first_use:
            for algorithm in (Algorithm.ring, Algorithm.tree):
                self._memory.connect(algorithm, self._n_channels)
        _communicators.append(self)

    def issue(self, fused_groups: Sequence[FusedTasks], n_tasks: int = 1) -> list[IssuedCall]:
        """Publish one group of collectives; does not wait for other ranks."""
        with self._issuing:
            self._refuse_after_failure()
            arrival_us = clock.current().arrival_us()
            are_wanted = self._chooser is not None and self._plugins.wants_events
            try:
                candidates = self.decide(fused_groups, n_tasks, captured=False)
            except (EmulatedNcclError, RuntimeError) as failure:
                self._publish(self._new_call(fused_groups[0], arrival_us, BASELINE), failed=True)
                self._failure = failure
                raise
            calls = [
                self._issue(fused, arrival_us, candidate)
                for fused, candidate in zip(fused_groups, candidates, strict=True)
            ]
            self._events.enqueued(calls, are_wanted=are_wanted)
            clock.current().skip_cpu()
            return calls

    def replay(
        self, decided: Sequence[tuple[FusedTasks, Candidate]], captured: CapturedGroup | None
    ) -> list[IssuedCall]:
        """Publish one group of a captured graph, with the settings of the capture.

        `captured` is the result of `begin_capture`; None: the profiler does not want events.
        """
        with self._issuing:
            self._refuse_after_failure()
            arrival_us = clock.current().arrival_us()
            calls = [self._issue(fused, arrival_us, candidate) for fused, candidate in decided]
            if captured is not None:
                self._events.enqueued(calls, captured, are_wanted=False)
            clock.current().skip_cpu()
            return calls

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise EmulatedNcclError(f"this communicator has failed: {self._failure}") from self._failure

    def _issue(self, fused: FusedTasks, arrival_us: float, candidate: Candidate) -> IssuedCall:
        call = self._new_call(fused, arrival_us, candidate)
        self._publish(call, failed=False)
        self._pending.append(call)
        return call

    def _new_call(self, fused: FusedTasks, arrival_us: float, candidate: Candidate) -> IssuedCall:
        index = self._n_issued
        self._n_issued += 1
        skew_us = self._fabric.noise.skew_us(self._emulation.seed, self.comm_id, index, self.rank)
        call = IssuedCall(self, index, fused, fused.message_bytes, arrival_us + skew_us, candidate)
        call.n_channels = self._n_channels if fused.path is Path.symmetric else call.candidate.n_channels
        call.duration_us = self._duration_us(call)
        return call

    def decide(self, fused_groups: Sequence[FusedTasks], n_tasks: int, *, captured: bool) -> list[Candidate]:
        """Choose the settings of a group's tasks, and connect their algorithms; the baseline if NCCL has no choice."""
        candidates = []
        chosen = [self._choose(fused, n_tasks, captured) for fused in fused_groups]
        for fused, candidate in zip(fused_groups, chosen, strict=True):
            if candidate is not BASELINE:
                # NCCL asks for chunk sizes after all settings are chosen, for each channel's part.
                share_bytes = fused.message_bytes // candidate.n_channels
                chunk_bytes = self._plugins.chunk_bytes(fused.collective, share_bytes, candidate)
                if chunk_bytes:
                    candidate = msgspec.structs.replace(candidate, chunk_bytes=chunk_bytes)
                candidate = faults.forced(candidate, self._global_rank)
                faults.check(candidate)
                self._memory.connect(candidate.algorithm, candidate.n_channels)
            candidates.append(candidate)
        return candidates

    def _choose(self, fused: FusedTasks, n_tasks: int, captured: bool) -> Candidate:
        if self._chooser is None or fused.message_bytes == 0:
            return BASELINE
        if fused.collective not in TUNED:
            if fused.collective is Collective.all_to_all:
                self._chooser.ask_for_all_to_all(fused.message_bytes)
            return BASELINE
        asked = fused.collective, fused.message_bytes, fused.op.is_scaled, -(-n_tasks // self._n_channels), captured
        if fused.path is Path.kernel:
            return self._chooser.choose(*asked)
        if fused.path is Path.symmetric:
            self._chooser.ask_for_symmetric(*asked)
        return BASELINE

    def begin_capture(self, decided: Sequence[tuple[FusedTasks, Candidate]]) -> CapturedGroup | None:
        """A graph captures one group; None: the profiler wants no events of it, now and at replays."""
        return self._events.begin_capture(decided)

    def _duration_us(self, call: IssuedCall) -> float:
        candidate, collective = call.candidate, call.fused.collective
        key = (collective, call.message_bytes, candidate)
        truth_us = self._truths.get(key)
        if truth_us is None:
            chunk_factors = [one.us_factor(self._shape, candidate) for one in self._fabric.chunks]
            factor = math.prod([self._us_factor, *chunk_factors])
            truth_us = self._truths[key] = factor * self._fabric.truth_us(
                self._shape, collective, candidate.algorithm, candidate.protocol,
                min(max(1, candidate.n_channels), self._fabric.max_channels(self._shape)), call.message_bytes,
            )  # fmt: skip
        algorithm, protocol = candidate.algorithm, candidate.protocol
        return truth_us * self._fabric.noise.factor(
            self._emulation.seed, self.comm_id, call.index,
            -1 if algorithm is None else int(algorithm), -1 if protocol is None else int(protocol),
            candidate.n_channels,
        )  # fmt: skip

    def _publish(self, call: IssuedCall, *, failed: bool) -> None:
        candidate, header, fused = call.candidate, self._header, call.fused
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
        clock.current().hold(start_us, self._own_end_us, call.n_channels)
        header.message_bytes = call.message_bytes
        header.n_elements = fused.tasks[0].count
        header.arrival_us, header.contention = call.own_arrival_us, contention
        header.root, header.collective = fused.root if len(fused.tasks) == 1 else -1, fused.collective
        header.datatype, header.redop = DATATYPES.get(fused.dtype, BYTES)[0], fused.op.code
        header.algorithm = NO_SETTING if candidate.algorithm is None else candidate.algorithm
        header.protocol = NO_SETTING if candidate.protocol is None else candidate.protocol
        header.n_channels, header.failed, header.even = candidate.n_channels, failed, fused.even
        header.chunk_kib = candidate.chunk_bytes >> 10
        pieces = [_EMPTY if task.piece is None else task.piece for task in fused.tasks]
        while True:
            if self.rendezvous.publish(header, pieces) >= 0:
                return
            # The ring or the arena is full: complete own calls, then wait until the slowest rank has completed its.
            if self._pending:
                oldest = self._pending[0]
                self.complete(self._pending[len(self._pending) // 2])
                self.rendezvous.wait_consumed(oldest.index, self.timeout_us)
            else:
                self.rendezvous.wait_consumed(call.index - 1, self.timeout_us)

    def complete(self, call: IssuedCall, timeout_us: int | None = None) -> float:
        """Complete all calls up to `call`, and return its virtual end. May block; may be called on any thread.

        If this fails, every rank that still runs raises the same error.
        """
        if call.end_us is None:
            with self._completing:
                while call.end_us is None and call.error is None:
                    self._complete_oldest(self._pending[0], self.timeout_us if timeout_us is None else timeout_us)
        if call.error is not None:
            raise call.error
        assert call.end_us is not None
        return call.end_us

    def is_ready(self, call: IssuedCall) -> bool:
        """Whether `complete` would not block."""
        return call.end_us is not None or call.error is not None or self.rendezvous.is_ready(call.index)

    def _complete_oldest(self, call: IssuedCall, timeout_us: int) -> None:
        try:
            self._refuse_after_failure()
            self.rendezvous.wait(call.index, timeout_us)
            joined = self.rendezvous.join(call.index)
            if joined.failed_rank >= 0 or joined.call_rank >= 0 or joined.setting_rank >= 0:
                raise self._explain(call.index, joined.failed_rank, joined.call_rank, joined.setting_rank)
            if faults.hangs(call.candidate):
                self.rendezvous.wait(call.index + 10**9, timeout_us)
            previous_end_us = self._stream_end_us
            start_us = max(joined.arrival_us, previous_end_us)
            if joined.message_bytes != call.message_bytes:  # uneven all_to_all: the largest rank's bytes count
                call.message_bytes = joined.message_bytes
                call.duration_us = self._duration_us(call)
            self._stream_end_us = end_us = start_us + call.duration_us * (1.0 + joined.contention)
            for piece, task in enumerate(call.fused.tasks):
                if task.finish is not None:
                    task.finish(call, piece)
            self.rendezvous.consume(call.index)
            self._events.ran(call, max(call.own_arrival_us, previous_end_us), end_us)
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

    def _record(self, call: IssuedCall, start_us: float, end_us: float) -> None:
        record = journal()
        record.n_calls += 1
        collective = call.fused.collective
        if call.candidate is not BASELINE:
            record.counts[collective, call.message_bytes, call.candidate] += 1
        if record.keep_calls:
            record.calls.append(
                JournalCall(self.comm_id, call.index, collective, call.message_bytes, call.candidate, start_us, end_us)
            )

    def close(self) -> None:
        """Destroy the communicator, without waiting for its calls."""
        if self in _communicators:
            _communicators.remove(self)
            self._plugins.finalize()
            self._memory.release()
            self.rendezvous.abort()
            with self._issuing, self._completing:  # the abort has ended waits
                self.rendezvous.close()


def close_all() -> None:
    """Destroy communicators of an earlier default group: older torch destroys groups without calling `shutdown`."""
    for left in list(_communicators):
        left.close()


def _describe_call(header: Header) -> str:
    return f"{Collective(header.collective).name} of {header.message_bytes} bytes, {header.n_elements} per rank"


def _describe_setting(header: Header) -> str:
    if header.algorithm == NO_SETTING:
        return "no setting"
    cell = Algorithm(header.algorithm), Protocol(header.protocol)
    return str(Candidate(*cell, header.n_channels, header.chunk_kib << 10))


_EMPTY: Final = torch.empty(0, dtype=torch.uint8)
_communicators: list[Communicator] = []
incarnations: Counter[tuple[object, ...]] = Counter()
