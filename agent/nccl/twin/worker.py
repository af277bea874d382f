"""One node of a twin: a thread per rank, in a process of its own.

Reads a NodeRequest from standard input. Node 0 writes the id that the other nodes need, then its NodeAnswer.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....store.errors import UserError, ZerotuneError
from ....store.records import Algorithm, Plan, Protocol
from .. import library
from ..libnccl import AVERAGE, SUM, Libnccl
from ..mock_cuda.machine import read_machine
from ..mock_cuda.mock import MockCuda
from .protocol import FAILED, USER_ERROR, Answer, Cell, NodeAnswer, NodeRequest, Question, Ran, duration_us
from .search import LOG, read_search

NEVER_US: Final = 1e30
"""NCCL 2.32 gives such a cost to a cell that it never chooses, PAT over several ranks of a node."""
_UNKNOWN: Final = 255
_MATCHED, _TIMED = 1, 2
"""Flags of a record."""
_MANY_NODES_SINCE: Final = (2, 22)
"""The network proxies of 2.21 wait for kernels in a way that the mock does not support."""
_REPORTS_ENDS_SINCE: Final = (2, 27)
"""NCCL 2.26 reports a kernel's end when the next kernel begins; older releases do not report it."""
_OBSERVED_WITHIN_S: Final = 2.0
_POLL_S: Final = 0.002


class Node:
    """The libraries of this process and its ranks' communicators."""

    def __init__(self, request: NodeRequest) -> None:
        self.log: Final = os.memfd_create("nccl.log") if request.search else -1
        if request.search:
            os.environ.update(LOG, NCCL_DEBUG_FILE=f"/proc/{os.getpid()}/fd/{self.log}")
        self.request: Final = request
        self.n_ranks: Final = request.n_nodes * request.ranks_per_node
        self.mock: Final = MockCuda()
        self.mock.set_machine(read_machine(Path(request.topology)), f"twin-node-{request.node}")
        self.plugin: Final = library.load()
        name = self.plugin.path.name  # a name, as in the agent: NCCL 2.27.3 accepts no path
        os.environ.update(NCCL_TUNER_PLUGIN=name, NCCL_PROFILER_PLUGIN=name)
        self.plugin.set_observing(request.observe)
        self.nccl: Final = Libnccl(Path(request.library))
        if self.nccl.version < _MANY_NODES_SINCE and request.n_nodes > 1:
            raise UserError(f"NCCL {self.nccl.version_text} cannot be asked about several nodes", "take 2.22 or newer")
        self.mock.attach(Path(request.library), self.nccl.library, self.nccl.version)
        self.mock.set_recording(True)
        self.plugin.set_recording(True)
        self.communicators: Final = [0] * request.ranks_per_node
        largest = max((question.message_bytes for question in request.questions), default=0)
        self.buffers: Final = (self.mock.malloc(largest), self.mock.malloc(largest))

    def read_log(self) -> str:
        """NCCL's log so far."""
        return os.pread(self.log, os.fstat(self.log).st_size, 0).decode(errors="replace")

    def on_all_ranks(self, work: str, *arguments: object) -> None:
        """Call a method of this class for each rank of the node, in a thread each; raises the first error of a rank."""
        errors: list[ZerotuneError] = []

        def run(place: int) -> None:
            try:
                self.mock.set_device(place)
                getattr(self, work)(place, *arguments)
            except ZerotuneError as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(place,)) for place in range(self.request.ranks_per_node)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def connect(self, place: int, unique_id: bytes) -> None:
        """Make one rank's communicator."""
        rank = self.request.node * self.request.ranks_per_node + place
        self.communicators[place] = self.nccl.init_rank(self.n_ranks, unique_id, rank)

    def enqueue(self, place: int, question: Question) -> None:
        """Make one rank's call."""
        self.nccl.enqueue(
            *(question.collective, self.communicators[place], question.message_bytes, self.n_ranks, self.buffers),
            operation=AVERAGE if question.average else SUM,
        )

    def answers(self) -> Iterator[Answer]:
        """Ask each question on all ranks, one after the other."""
        for place, question in enumerate(self.request.questions):
            n_ignored, used_bytes = self.plugin.counters().n_ignored_cells, self.mock.used_bytes(0)
            self.plugin.set_phase(int(question.phase))
            self.mock.set_duration_us(duration_us(place))
            self.on_all_ranks("enqueue", question)
            records = self._records()
            ignored = self.plugin.counters().n_ignored_cells > n_ignored
            answer = self._answer(question, records, self.mock.drain(), ignored=ignored)
            yield msgspec.structs.replace(answer, taken_bytes=self.mock.used_bytes(0) - used_bytes)

    def _records(self) -> NDArray[np.void]:
        """The plugin's records of the latest question; if kernels are observed, waits for their ends."""
        records = self.plugin.drain()
        deadline_s = time.monotonic() + _OBSERVED_WITHIN_S
        waits = self.request.observe and self.nccl.version >= _REPORTS_ENDS_SINCE
        n_expected = self.request.ranks_per_node if waits else 0
        while len(records[records["flags"] & _TIMED != 0]) < n_expected and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            records = np.concatenate([records, self.plugin.drain()])
        return records

    def _answer(
        self, question: Question, records: NDArray[np.void], works: NDArray[np.void], *, ignored: bool
    ) -> Answer:
        """The answer to one question; all ranks of a node must have chosen alike."""
        timed = records["flags"] & _TIMED != 0
        decisions = records[~timed]
        kinds = {tuple(int(each[name]) for name in ("algorithm", "protocol", "n_channels")) for each in decisions}
        kernels = {tuple(int(work[name]) for name in ("function_id", "channel_mask", "count")) for work in works}
        if len(kinds) > 1 or len(kernels) > 1:
            raise ZerotuneError(f"ranks of one node decided differently for {question}: {kinds}, {kernels}")
        algorithm, protocol, _ = next(iter(kinds), (_UNKNOWN, _UNKNOWN, 0))
        function_id, channel_mask, count = next(iter(kernels), (0, 0, 0))
        return Answer(
            question=question,
            algorithm=None if algorithm == _UNKNOWN else Algorithm(algorithm),
            protocol=None if protocol == _UNKNOWN else Protocol(protocol),
            n_channels=channel_mask.bit_count(),
            n_decisions=len(decisions) // self.request.ranks_per_node,
            function_id=function_id,
            count=count,
            cells=tuple(_cells(self.plugin.drain_costs())),
            matched=bool(len(decisions)) and bool(decisions[0]["flags"] & _MATCHED),
            ignored=ignored,
            n_nodes=int(decisions[0]["n_nodes"]) if len(decisions) else 0,
            ran=tuple(_ran(each) for each in records[timed]),
        )


def _ran(record: np.void) -> Ran:
    return Ran(
        algorithm=int(record["algorithm"]),
        protocol=int(record["protocol"]),
        n_channels=int(record["n_channels"]),
        message_bytes=int(record["message_bytes"]),
        duration_us=float(record["duration_us"]),
        timing_source=int(record["timing_source"]),
    )


def _cells(costs: NDArray[np.void]) -> Iterator[Cell]:
    for record in costs[:1]:
        for algorithm in Algorithm:
            for protocol in Protocol:
                cost_us = float(record["cost_us"][int(algorithm)][int(protocol)])
                if 0 <= cost_us < NEVER_US:
                    yield Cell(algorithm, protocol, cost_us)


def run(request: NodeRequest, out: TextIO) -> NodeAnswer:
    """Make the node's communicators and ask its questions; node 0 writes the id to `out` meanwhile.

    Raises:
        ZerotuneError: the library, the topology or a call fails.
    """
    began = time.monotonic()
    node = Node(request)
    unique_id = bytes.fromhex(request.unique_id)
    if request.node == 0:
        unique_id = node.nccl.unique_id()
        print(unique_id.hex(), file=out, flush=True)
    node.on_all_ranks("connect", unique_id)
    init_s = time.monotonic() - began
    if request.rows:
        node.plugin.load_plan(Plan(epoch=1, rows=request.rows))
        node.plugin.flip(1)
    answers = tuple(node.answers())
    search = read_search(node.read_log()) if request.search else None
    return NodeAnswer(node.nccl.version, node.plugin.tuner_abi(), init_s, answers, search)


def main() -> int:
    """Answer the request on standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NCCL's output goes to standard error
    try:
        answer = run(msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeRequest), out)
    except ZerotuneError as error:
        print(error, file=sys.stderr, flush=True)
        return USER_ERROR if isinstance(error, UserError) else FAILED
    print(msgspec.json.encode(answer).decode(), file=out, flush=True)
    sys.stdin.buffer.read()  # other nodes may still need this process
    return 0


if __name__ == "__main__":
    # Communicators are not destroyed: the process's end frees their memory.
    os._exit(main())
