"""The `emulated_nccl` backend: torch.distributed's collectives as calls on an emulated communicator.

Payloads of collectives go through the communicator's shared memory. An inner gloo group serves point-to-point messages
and everything that torch asks a plain backend for. The communicator is made at the first collective, as in
ProcessGroupNCCL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from .....store.records import Collective
from ..device import clock
from ..device.memory import device
from ..errors import EmulatedNcclError
from ..host import grouping
from ..host.calls import Task
from ..host.communicator import Communicator, close_all
from ..settings import announce, emulation
from ..transport.start import name_start
from . import capture, shrinking, tasks
from .alias import BACKEND
from .object_messages import by_gloo
from .reduction import SUM, Operator, operator
from .work import EmulatedWork

_HANDLES_DIE_IN_CPP: Final = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8)
"""Older torch drops the Python part of a work that C++ holds, and then waits for it forever."""
_RECENT_WORKS: Final = 64
"""Newest works that are kept alive because of that: more than DDP has in flight."""
Tensors = Sequence[torch.Tensor]


# torch's stubs give one class several incompatible signatures, and lack its constructor for Python.
_ProcessGroup: Any = dist.ProcessGroup


class Options:
    """The part of `ProcessGroupNCCL.Options` that the emulation supports: `config.max_ctas`; None: NCCL's own."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(max_ctas=None)


# torch's stubs give the base class wrong signatures (hence Any).
class EmulatedProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose collectives run on the emulated NCCL."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        n_ranks: int,
        timeout: timedelta,
        name: str,
        ranks: Sequence[int],
        max_ctas: int | None = None,
    ) -> None:
        super().__init__(rank, n_ranks)
        self._max_ctas = max_ctas
        emulation()  # a malformed fabric file is reported here, not at the first collective
        if not ranks:  # the default group
            close_all()
            if rank == 0:
                announce(n_ranks)
        store = dist.PrefixStore(name_start(store, name, ranks, rank, n_ranks, timeout), store)
        self._store, self._rank, self._n_ranks = store, rank, n_ranks
        self._timeout, self._name = timeout, name
        self._ranks = list(ranks) or list(range(n_ranks))
        self._communicator: Communicator | None = None
        self._coalesced: list[grouping.Deferred] | None = None
        self._closed = False
        self.sends_objects_by_gloo = False
        """Whether the group was made with backends "cpu:gloo,cuda:nccl"."""
        self._recent: deque[Work] = deque(maxlen=_RECENT_WORKS)
        gloo: Any = shrinking.InnerGloo(self, dist.PrefixStore("gloo/", store), rank, n_ranks, timeout)
        self._gloo = gloo
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:
        """The backend's name."""
        return BACKEND

    @property
    def communicator(self) -> Communicator:
        """The communicator, made now if need be; raises EmulatedNcclError after `shutdown`."""
        if self._communicator is None:
            if self._closed:
                raise EmulatedNcclError("this process group has been destroyed")
            self._communicator = Communicator(
                emulation(), self._store, self._name, self._rank, self._ranks, self._timeout, self._max_ctas
            )
        return self._communicator

    def register_window(self, tensor: torch.Tensor) -> None:
        """Make `tensor` a window of the communicator, as `ncclCommWindowRegister` does; all ranks must call it."""
        self.communicator.registered_buffers.register(tensor)

    def deregister_window(self, tensor: torch.Tensor) -> None:
        """Undo `register_window`."""
        self.communicator.registered_buffers.deregister(tensor)

    def now_us(self) -> float:
        """This rank's virtual time, for scripts that time steps."""
        return clock.now_us()

    def left_bytes(self) -> int:
        """Free memory of the emulated device, as `cudaMemGetInfo`."""
        return device().left_bytes()

    def is_capturing(self) -> bool:
        """Whether collectives become part of a graph, as `is_current_stream_capturing`."""
        return capture.current() is not None

    @property
    def options(self) -> Options:
        """The options with which it was made."""
        options = Options()
        options._timeout, options.config.max_ctas = self._timeout, self._max_ctas
        return options

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of collectives that are issued or waited for from now on."""
        self._timeout = timeout
        if self._communicator is not None:
            self._communicator.timeout_us = int(timeout.total_seconds() * 1e6)

    def shutdown(self) -> None:
        """Destroy the communicator, without waiting for its calls."""
        self._closed = True
        if self._communicator is not None:
            communicator, self._communicator = self._communicator, None
            communicator.close()

    def abort(self) -> None:
        """Abort the communicator."""
        self.shutdown()

    def shrink(self, excluded: Sequence[int], *, aborted: bool) -> EmulatedProcessGroup:
        """A group without the excluded ranks, as `ncclCommShrink` makes it; each remaining rank must call it.

        `aborted`: abort this group's calls first, as after an error.
        """
        if aborted:
            self.abort()
        left = [rank for rank in range(self._n_ranks) if rank not in excluded]
        ranks = [self._ranks[rank] for rank in left]
        return EmulatedProcessGroup(
            self._store, left.index(self._rank), len(left), self._timeout, f"{self._name}/shrunk", ranks
        )

    # Collectives for which NCCL chooses a setting.

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduce `tensors` in place over all ranks."""
        op = _operator(opts)
        return self._launch(Collective.all_reduce, [tasks.all_reduce(t, op) for t in _list(tensors)], op=op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        """Several all-reduces in one group."""
        return self.allreduce(tensors, opts)

    @by_gloo
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Overwrite `tensors` with the root's."""
        root = opts if isinstance(opts, int) else opts.rootRank
        todo = [tasks.broadcast(tensor, root, self._rank) for tensor in _list(tensors)]
        return self._launch(Collective.broadcast, todo, root=root)

    def reduce(self, tensors: Any, opts: Any = None, *_arguments: Any) -> Work:
        """Reduce to the root."""
        root, op = opts.rootRank, operator(opts.reduceOp)
        todo = [tasks.reduce(tensor, op, root, self._rank) for tensor in _list(tensors)]
        return self._launch(Collective.reduce, todo, op=op, root=root)

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """Fill `output` with every rank's `source`, in rank order."""
        return self._launch(Collective.all_gather, [tasks.all_gather(output, source, self._n_ranks)])

    def all_gather_single_coalesced(self, outputs: Tensors, sources: Tensors, opts: Any = None) -> Work:
        """Several gathers in one group."""
        todo = [
            tasks.all_gather(output, source, self._n_ranks) for output, source in zip(outputs, sources, strict=True)
        ]
        return self._launch(Collective.all_gather, todo)

    @by_gloo
    def allgather(self, output_lists: Any, sources: Any, opts: Any = None) -> Work:
        """Fill each list with every rank's tensor; if shapes differ by rank, NCCL uses broadcasts."""
        if isinstance(sources, torch.Tensor):
            output_lists, sources = [output_lists], [sources]
        outputs, source = output_lists[0], sources[0]
        if any(output.numel() != source.numel() for output in outputs):
            todo = [tasks.broadcast(output, root, self._rank, source) for root, output in enumerate(outputs)]
            return self._launch(Collective.broadcast, todo, root=-1)
        return self._launch(Collective.all_gather, [tasks.all_gather_list(outputs, source)])

    def allgather_coalesced(self, output_lists: Any, sources: Tensors, opts: Any = None) -> Work:
        """Several gathers into lists in one group; `output_lists` is by rank, then by tensor, as in gloo."""
        by_tensor = zip(*output_lists, strict=True)
        todo = [tasks.all_gather_list(outputs, source) for outputs, source in zip(by_tensor, sources, strict=True)]
        return self._launch(Collective.all_gather, todo)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Work:
        """Reduce, and keep this rank's part."""
        op = _operator(opts)
        return self._launch(
            Collective.reduce_scatter, [tasks.reduce_scatter(output, source, op, self._rank, self._n_ranks)], op=op
        )

    def reduce_scatter_single_coalesced(self, outputs: Tensors, sources: Tensors, opts: Any = None) -> Work:
        """Several scatters in one group."""
        op = _operator(opts)
        todo = [
            tasks.reduce_scatter(output, source, op, self._rank, self._n_ranks)
            for output, source in zip(outputs, sources, strict=True)
        ]
        return self._launch(Collective.reduce_scatter, todo, op=op)

    def reduce_scatter(self, outputs: Any, source_lists: Any, opts: Any = None, *_arguments: Any) -> Work:
        """Reduce lists of tensors, and keep this rank's; if shapes differ by rank, NCCL uses reductions."""
        if isinstance(outputs, torch.Tensor):
            outputs, source_lists = [outputs], [source_lists]
        op, output, sources = _operator(opts), outputs[0], source_lists[0]
        if any(source.numel() != output.numel() for source in sources):
            todo = [tasks.reduce(source, op, root, self._rank, output) for root, source in enumerate(sources)]
            return self._launch(Collective.reduce, todo, op=op, root=-1)
        capture.forbid("reduce_scatter from a list")
        flat = torch.cat([source.reshape(-1) for source in sources])
        return self._launch(
            Collective.reduce_scatter, [tasks.reduce_scatter(output, flat, op, self._rank, self._n_ranks)], op=op
        )

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:
        """An all-reduce of one element, as in ProcessGroupNCCL."""
        return self._launch(Collective.all_reduce, [tasks.BARRIER], dtype=torch.float32)

    # Collectives without a setting: NCCL makes them of sends and receives.

    @by_gloo
    def gather(self, output_lists: Any, sources: Any, opts: Any = None, *_arguments: Any) -> Work:
        """The root collects every rank's tensor."""
        root = opts.rootRank
        outputs = output_lists[0] if self._rank == root else []
        task = tasks.gather(outputs, _list(sources)[0], self._n_ranks)
        return self._launch(Collective.gather, [task], root=root, outputs=outputs, even=False)

    @by_gloo
    def scatter(self, outputs: Any, source_lists: Any, opts: Any = None, *_arguments: Any) -> Work:
        """The root hands each rank its tensor."""
        root, output = opts.rootRank, _list(outputs)[0]
        sources = source_lists[0] if self._rank == root else None
        return self._launch(
            Collective.scatter, [tasks.scatter(output, sources, root, self._rank, self._n_ranks)], root=root
        )

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:  # fmt: skip
        """Rank i's part j becomes rank j's part i; splits are row counts; empty: even parts."""
        outputs = torch.split(output, list(output_splits) or output.shape[0] // self._n_ranks)
        sources = torch.split(source, list(input_splits) or source.shape[0] // self._n_ranks)
        return self._all_to_all(outputs, sources, [output])

    def alltoall(self, outputs: Tensors, sources: Tensors, opts: Any = None) -> Work:
        """Rank i's j-th tensor becomes rank j's i-th; lists of tensors in place of splits."""
        return self._all_to_all(outputs, sources, outputs)

    # Point to point: gloo, on no timeline.

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        """Send to a rank of the group."""
        capture.forbid("point-to-point messages")
        return self._gloo.send(_list(tensors), destination, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Receive from a rank of the group."""
        return self._gloo.recv(_list(tensors), source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from the rank that sends first."""
        return self._gloo.recv_anysource(_list(tensors), tag)

    # Groups.

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:
        deferred, self._coalesced = self._coalesced or [], None
        return grouping.launch(self.communicator, deferred)

    # Torch before 2.13 has other names for these.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _all_to_all(self, outputs: Tensors, sources: Tensors, results: Tensors) -> Work:
        todo = tasks.all_to_all(outputs, sources, self._rank)
        return self._launch(Collective.all_to_all, todo, outputs=results, even=False)

    def _launch(
        self, collective: Collective, todo: list[Task], *, op: Operator = SUM, root: int = -1,
        outputs: Tensors | None = None, dtype: torch.dtype | None = None, even: bool = True,
    ) -> Work:  # fmt: skip
        if outputs is None:
            outputs = [task.output for task in todo if task.output is not None]
        if dtype is None:
            dtype = outputs[0].dtype if outputs else torch.uint8
        deferred = grouping.Deferred(collective, todo, outputs, dtype, op, root, even)
        if self._coalesced is not None:
            self._coalesced.append(deferred)
            return EmulatedWork((), outputs)
        work = grouping.launch(self.communicator, [deferred])
        if _HANDLES_DIE_IN_CPP:
            self._recent.append(work)
        return work


def create(options: Any, backend_options: Any = None) -> EmulatedProcessGroup:
    """Called by torch to make a group of the backend."""
    asked = getattr(getattr(backend_options, "config", None), "max_ctas", None)
    return EmulatedProcessGroup(
        options.store, options.group_rank, options.group_size, options.timeout, str(options.group_id),
        options.global_ranks_in_group, asked if asked is not None and asked > 0 else None,
    )  # fmt: skip


def _list(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _operator(opts: Any) -> Operator:
    if opts is None:
        return SUM
    return operator(getattr(opts, "reduceOp", opts))
