"""One communicator of NCCL's own library.

A group is called in the library, which consults the tuner and launches; what its kernels were launched with is the
setting. They wait on the mock GPU until the call's times on the virtual clock are known; then the library tells its
profiler of them.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import compress
from typing import Final
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from zerotune.agent.nccl.emulated.errors import EmulatedNcclError
from zerotune.agent.nccl.emulated.host.calls import NO_DECISION, TUNED, Decision, FusedTasks, IssuedCall, Task
from zerotune.agent.nccl.emulated.host.datatypes import BYTES, DATATYPES
from zerotune.agent.nccl.emulated.host.library.process import LibraryProcess
from zerotune.agent.nccl.emulated.host.library.watchdog import watched
from zerotune.agent.nccl.emulated.host.nccl_host import NcclHost
from zerotune.agent.nccl.emulated.torch_backend.reduction import PREMULTIPLIED_SUM
from zerotune.agent.nccl.emulated.transport.rendezvous import Header, Rendezvous
from zerotune.agent.nccl.libnccl import NcclError
from zerotune.agent.nccl.mock_cuda.mock import Graph
from zerotune.store.records import Candidate, Collective

_BUFFERS: Final = (1 << 40, 1 << 41)
"""Addresses that nobody reads: the payload travels elsewhere."""
_OPERATIONS: Final = {0: 0, 1: 4, 2: 1, 3: 3, 4: 2}
"""ncclRedOp_t by torch's code: sum, average, product, minimum, maximum."""
_OF_BYTES: Final = frozenset({Collective.all_gather, Collective.broadcast})
"""NCCL turns these into collectives of bytes."""
_PARTS: Final = {torch.complex64: torch.float32, torch.complex128: torch.float64}
"""Torch hands complex numbers to NCCL as pairs."""


class _Launch:
    """A kernel that waits for the times of its works."""

    def __init__(self, n_works: int) -> None:
        self.start_ns, self.end_ns = [0] * n_works, [0] * n_works
        self.n_open = n_works


class LibraryHost(NcclHost):
    """See the module; making one waits for the other ranks.

    Raises:
        EmulatedNcclError: the library cannot make the communicator.
    """

    has_windows = False
    """Payloads travel outside of the library, so it does not see the buffers."""

    def __init__(
        self, process: LibraryProcess, store: dist.Store, key: str, announced: Rendezvous, timeout_us: int
    ) -> None:
        rank, n_ranks = announced.rank, announced.n_ranks
        self._announced, self._timeout_us = announced, timeout_us
        self._process, self._nccl, self._mock = process, process.nccl, process.mock
        self.release = process.release
        self._n_ranks = n_ranks
        self._is_open = True
        self._launches: dict[int, _Launch] = {}
        self._scaled: dict[int, int] = {}
        self._captured: Graph | None = None
        self._graphs: WeakSet[Graph] = WeakSet()
        self._mock.set_device(process.device)
        try:
            if rank == 0:
                store.set(key, self._nccl.unique_id().hex())
            unique_id = bytes.fromhex(store.get(key).decode())
            self._await_all_ranks()
            self._communicator = self._nccl.init_rank(n_ranks, unique_id, rank)
        except NcclError as error:
            raise EmulatedNcclError(str(error)) from error

    def _await_all_ranks(self) -> None:
        """Before the library makes a communicator: there it waits without end for a rank that stays away."""
        index = self._announced.publish(Header(), [])
        self._announced.wait(index, self._timeout_us)
        self._announced.consume(index)

    def decide(self, fused_groups: Sequence[FusedTasks], n_tasks: int, *, captured: bool) -> list[Decision]:
        """See NcclHost."""
        has_setting = [self._is_decided(each) for each in fused_groups]
        tuned = list(compress(fused_groups, has_setting))
        self._captured = None
        if not tuned:
            return [NO_DECISION] * len(fused_groups)
        self._mock.set_device(self._process.device)
        try:
            with (
                watched(self._announced, _header(tuned), self._timeout_us, self._abort),
                self._stream(captured=captured) as stream,
                self._nccl.group(),
            ):
                for fused in tuned:
                    for task in fused.tasks:
                        if task.message_bytes:
                            self._call(fused, task, stream)
        except NcclError as error:
            raise EmulatedNcclError(str(error)) from error
        finally:
            works = self._mock.take()  # of a call that failed, too: or the next would find them
        if not captured:
            self._await(works)
        decisions = iter(self._decisions(tuned, works))
        return [next(decisions) if is_tuned else NO_DECISION for is_tuned in has_setting]

    def _is_decided(self, fused: FusedTasks) -> bool:
        return self._n_ranks > 1 and fused.collective in TUNED and fused.message_bytes > 0

    @contextmanager
    def _stream(self, *, captured: bool) -> Iterator[int | None]:
        """The default stream, or one that captures."""
        if not captured:
            yield None
            return
        stream = self._mock.begin_capture()
        try:
            yield stream
        except BaseException:
            self._mock.end_capture(stream).destroy()
            raise
        self._captured = self._mock.end_capture(stream)
        self._graphs.add(self._captured)

    def _call(self, fused: FusedTasks, task: Task, stream: int | None) -> None:
        collective = fused.collective
        n_parts, dtype = (2, _PARTS[fused.dtype]) if fused.dtype in _PARTS else (1, fused.dtype)
        datatype = 0 if collective in _OF_BYTES else DATATYPES.get(dtype, BYTES)[0]
        operation = 0 if collective in _OF_BYTES else self._operation(fused, datatype)
        if datatype == BYTES[0]:
            raise EmulatedNcclError(f"NCCL cannot reduce {fused.dtype}")
        count = task.count if collective in _OF_BYTES else task.count * n_parts
        self._nccl.call(
            collective, self._communicator, _BUFFERS, count, datatype, operation=operation, root=task.root,
            stream=stream,
        )  # fmt: skip

    def _operation(self, fused: FusedTasks, datatype: int) -> int:
        code = fused.op.code
        if code == PREMULTIPLIED_SUM:
            if datatype not in self._scaled:
                self._scaled[datatype] = self._nccl.premultiplied_sum(datatype, self._communicator)
            return self._scaled[datatype]
        return _OPERATIONS[code]

    def _await(self, works: NDArray[np.void]) -> None:
        """Kernels that wait for the times of these."""
        for launch, n_works in zip(*np.unique(works["launch"], return_counts=True), strict=True):
            self._launches[int(launch)] = _Launch(int(n_works))

    def _decisions(self, tuned: Sequence[FusedTasks], works: NDArray[np.void]) -> list[Decision]:
        """What was launched for each, by function and count."""
        asked: dict[tuple[Collective, int], deque[int]] = defaultdict(deque)
        for place, fused in enumerate(tuned):
            n_parts = 2 if fused.dtype in _PARTS and fused.collective not in _OF_BYTES else 1
            for task in fused.tasks:
                if task.message_bytes:
                    asked[fused.collective, task.count * n_parts].append(place)
        launched: list[list[np.void]] = [[] for _ in tuned]
        others: list[np.void] = []
        for work in works:
            places = asked[self._process.functions[int(work["function_id"])].collective, int(work["count"])]
            (launched[places.popleft()] if places else others).append(work)
        missing = [key for key, left in asked.items() if left]
        # From 2.29 on, grouped broadcasts are one all-gather of unequal parts: a kernel without a setting.
        if any(collective is not Collective.broadcast for collective, _ in missing) or (others and not missing):
            raise EmulatedNcclError(f"NCCL launched nothing for {missing}, and {len(others)} collectives nobody called")
        for work in others:
            self._end(int(work["launch"]), int(work["number"]), 0, 0)
        return [self._decision(each) for each in launched]

    def _decision(self, works: Sequence[np.void]) -> Decision:
        settings = {self._process.functions[int(work["function_id"])][1:] for work in works}
        if len(settings) > 1:
            raise EmulatedNcclError(f"NCCL gave tasks that it fuses different settings: {settings}")
        if not settings:
            return NO_DECISION
        (algorithm, protocol), channels = settings.pop(), 0
        for work in works:
            channels |= int(work["channel_mask"])
        return Decision(
            Candidate(algorithm, protocol, channels.bit_count()),
            kernels=tuple((int(work["launch"]), int(work["number"])) for work in works),
        )

    def enqueued(self, calls: Sequence[IssuedCall], captured: Graph | None = None) -> None:
        """See NcclHost: the library tells its profiler by itself; a graph is launched."""
        if captured is None:
            return
        self._mock.set_device(self._process.device)
        captured.launch()
        works = self._mock.take()
        self._await(works)
        tuned = [call for call in calls if self._is_decided(call.fused)]
        decisions = self._decisions([call.fused for call in tuned], works)
        for call, decision in zip(tuned, decisions, strict=True):
            call.decision = replace(call.decision, kernels=decision.kernels)

    def begin_capture(self, decided: Sequence[tuple[FusedTasks, Candidate]]) -> Graph | None:
        """See NcclHost: what `decide` has just captured."""
        return self._captured

    def ran(self, call: IssuedCall, start_us: float, end_us: float) -> None:
        """See NcclHost."""
        for launch, number in call.decision.kernels:
            self._end(launch, number, round(start_us * 1000), round(end_us * 1000))

    def _end(self, launch: int, number: int, start_ns: int, end_ns: int) -> None:
        """One work of a kernel is over; the last ends the kernel."""
        waiting = self._launches.get(launch)
        if waiting is None:  # captured: it runs with its graph
            return
        waiting.start_ns[number], waiting.end_ns[number] = start_ns, end_ns
        waiting.n_open -= 1
        if waiting.n_open == 0:
            self._mock.finish(launch, waiting.start_ns, waiting.end_ns)
            del self._launches[launch]

    def close(self, *, failed: bool) -> None:
        """See NcclHost."""
        for launch, waiting in self._launches.items():
            self._mock.finish(launch, waiting.start_ns, waiting.end_ns)
        self._launches.clear()
        if self._is_open:
            self._is_open = False
            self._mock.set_device(self._process.device)
            self._destroy_graphs()
            with suppress(NcclError):
                (self._nccl.abort if failed else self._nccl.destroy)(self._communicator)
        self._announced.close()

    def _abort(self, returned: threading.Event) -> None:
        self._is_open = False
        self._mock.set_device(self._process.device)
        # An abort inside a group makes calls return at once, and frees the communicator at the group's end.
        with suppress(NcclError), self._nccl.group():
            self._nccl.abort(self._communicator)
            returned.wait()
            self._destroy_graphs()

    def _destroy_graphs(self) -> None:
        """NCCL waits for them before it gives a communicator up."""
        for graph in list(self._graphs):
            graph.destroy()


def _header(fused_groups: Sequence[FusedTasks]) -> Header:
    """What all ranks must call alike."""
    first = fused_groups[0]
    return Header(
        message_bytes=sum(fused.message_bytes for fused in fused_groups),
        collective=first.collective,
        datatype=DATATYPES.get(first.dtype, BYTES)[0],
        redop=first.op.code,
        root=first.root,
        even=True,
    )
