"""What agreement costs at scale: thousands of ranks against one real c10d TCPStore.

Run: python -m benchmarks agreement_scale [--quick] [--json]

Rank 0 is a real `Agreement`. The other ranks are sockets in one process, which send a background thread's requests.
Each rank is in a communicator of 8 ranks and in one of an eighth of the job. The store has a process of its own.
"""

from __future__ import annotations

import multiprocessing as mp
import resource
import selectors
import socket
import statistics
import struct
import time
from collections import deque
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import torch.distributed as dist

from benchmarks.lib.reporting import Result, options_of, report
from zerotune.agent.agreement import Agreement, job_start
from zerotune.agent.agreement.news import Offered
from zerotune.agent.agreement.protocol import Answer, Member, Outcome, PlanChange, decode, encode, framed
from zerotune.agent.nccl import library
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol

PREFIX = "zerotune"
INCARNATION = 1
TIMEOUT = timedelta(seconds=120)
LOOPBACK = "127.0.0.1"
RANKS_PER_GROUP = 8
CALLS_PER_STEP = 96
N_CALLS = 10_000
N_RANKS = 4096
N_CHECKPOINTS = 16

# c10d's TCPStore protocol: one byte of query, then strings with their length as unsigned 64 bits.
COMPARE_SET, APPEND = 2, 9
HANDSHAKE = struct.pack("<BI", 0, 0x3C85F7CE)
NOTHING = b"\0"


def packed(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def key(name: str) -> bytes:
    return packed(f"/{PREFIX}/{INCARNATION}/{name}".encode())


def groups_of(rank: int, world_size: int) -> list[tuple[str, int]]:
    """(Name, number of ranks) of a rank's communicators."""
    n_groups = world_size // RANKS_PER_GROUP
    return [
        (f"{1 + rank // RANKS_PER_GROUP:016x}", RANKS_PER_GROUP),
        (f"{1 + n_groups + rank % RANKS_PER_GROUP:016x}", n_groups),
    ]


def step_calls() -> bytes:
    """A step: gathers of each layer forward and backward, and its scatters."""
    calls = [(1 << 24, 2, 1), (1 << 24, 2, 2), (1 << 25, 3, 3)] * (CALLS_PER_STEP // 3)
    return np.array(calls, library.CYCLE_DTYPE).tobytes()


def members_of(rank: int, world_size: int, cycle: bytes) -> tuple[Member, ...]:
    checkpoints = tuple((N_CALLS - 64 * i, 12345 * i) for i in range(N_CHECKPOINTS))
    return tuple(
        Member(name, n_ranks, N_CALLS + 50, 0, "", checkpoints, N_CALLS, CALLS_PER_STEP, 9, cycle)
        for name, n_ranks in groups_of(rank, world_size)
    )


class StubRank:
    def __init__(self, port: int, rank: int, world_size: int, cycle: bytes) -> None:
        self.socket = socket.create_connection((LOOPBACK, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(HANDSHAKE)
        self._rank, self._members = rank, members_of(rank, world_size, cycle)
        self._buffer = b""
        self.number = 0
        self.reads = ""
        self.n_requests = 0
        self.answered_s = self.waited_s = 0.0
        self.n_switched = 0

    def read(self, name: str) -> None:
        self.reads, self._buffer = name, b""
        self._send(struct.pack("<B", COMPARE_SET) + key(name) + packed(NOTHING) + packed(NOTHING))

    def on_data(self) -> bool:
        """Returns whether the outcome is known."""
        self._buffer += self.socket.recv(1 << 20)
        if len(self._buffer) < 8 or len(self._buffer) < 8 + struct.unpack_from("<Q", self._buffer)[0]:
            return False
        value = self._buffer[8:]
        reads, self.reads = self.reads, ""
        if value == NOTHING:
            return False
        if reads == "change":
            self.number = decode(value, PlanChange).number
            answer = framed(self._rank, encode(Answer(self.number, self._rank, self._members)))
            self._send(struct.pack("<B", APPEND) + key(f"answers/{self.number}") + packed(answer))
            self.answered_s = time.perf_counter()
            return False
        self.waited_s = time.perf_counter() - self.answered_s
        if self._rank == 1:
            self.n_switched = len(decode(value, Outcome).switches)
        return True

    def _send(self, request: bytes) -> None:
        self.n_requests += 1
        self.socket.sendall(request)


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(pipe: Connection) -> None:
    raise_file_limit()
    # TCPStore asks for each peer's name. Hosts files know 127.0.0.1, but not as the mapped IPv6 address
    # that a dual-stack socket shows; thousands of such questions would measure the name server.
    listener = socket.create_server((LOOPBACK, 0), backlog=4096)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    pipe.send(store.port)
    pipe.recv()


def follow(port: int, world_size: int, pipe: Connection) -> None:
    """Run all stub ranks until the pipe asks to stop."""
    raise_file_limit()
    cycle = library.pack_cycle(step_calls())
    stubs = [StubRank(port, rank, world_size, cycle) for rank in range(1, world_size)]
    selector = selectors.DefaultSelector()
    for stub in stubs:
        selector.register(stub.socket, selectors.EVENT_READ, stub)
    selector.register(pipe, selectors.EVENT_READ, None)
    pipe.send("connected")
    n_known = n_before = 0
    while True:
        for event, _ in selector.select():
            stub = event.data
            if stub is None:
                order = pipe.recv()
                if order == "stop":
                    return
                for each in stubs:
                    each.read("change" if each.number < order else f"outcome/{order}")
                continue
            n_known += stub.on_data()
        if n_known == len(stubs):
            n_requests = sum(each.n_requests for each in stubs)
            waited_s = max(each.waited_s for each in stubs)
            pipe.send((time.perf_counter(), n_requests - n_before, waited_s, stubs[0].n_switched))
            n_known, n_before = 0, n_requests


class StubPlugin:
    """Rank 0's communicators, without the work of a plan in the plugin."""

    def __init__(self, world_size: int) -> None:
        self._rows = np.zeros(2, library.COMMUNICATOR_DTYPE)
        for row, (name, n_ranks) in zip(self._rows, groups_of(0, world_size), strict=True):
            row["owner"], row["comm_id"] = int(name, 16), int(name, 16)
            row["n_ranks"], row["n_nodes"], row["n_calls"] = n_ranks, 1, N_CALLS
            row["step_began"], row["calls_per_step"], row["n_steady"] = N_CALLS, CALLS_PER_STEP, 9
            row["checkpoint_calls"] = [N_CALLS - 64 * i for i in range(N_CHECKPOINTS)]
            row["checkpoint_hash"] = [12345 * i for i in range(N_CHECKPOINTS)]

    def communicators(self) -> Any:
        return self._rows

    def cycle(self, owner: int, *, gathers_after_step: bool) -> bytes:
        return step_calls()

    def prepare(self, plan: Plan) -> None:
        return

    def prepare_end(self) -> None:
        return

    def promise(self, owner: int, lead_calls: int) -> int:
        return N_CALLS + 50

    def commit(self, *_: object) -> bool:
        return True

    def leave_alone(self, owner: int, from_call: int) -> bool:
        return True

    def release(self, owner: int) -> None:
        return

    def waits(self) -> tuple[int, float, int]:
        return 0, 0.0, 0


def plan(epoch: int, world_size: int) -> Plan:
    candidate = Candidate(Algorithm.ring, Protocol.simple, 16)
    shapes = [CommunicatorClass(n_ranks, 1) for _, n_ranks in groups_of(0, world_size)]
    rows = [PlanRow(shape, Collective.all_gather, Phase.forward_gather, 1, 2**30, candidate) for shape in set(shapes)]
    return Plan(epoch, tuple(rows))


def client(port: int) -> dist.Store:
    return dist.PrefixStore(PREFIX, dist.TCPStore(LOOPBACK, port, None, False, TIMEOUT, wait_for_workers=False))


def enlist_stubs(port: int, n_stubs: int, fingerprint: str) -> None:
    """Take the stubs through the start of the job, which happens once."""
    store: Any = dist.PrefixStore(str(INCARNATION), client(port))  # torch's stubs lack append
    for rank in range(1, 1 + n_stubs):
        store.append(job_start.fingerprints_key(1 + n_stubs), job_start.fingerprint_frame(rank, fingerprint))


def measure(world_size: int, n_changes: int) -> dict[str, float]:
    context = mp.get_context("spawn")

    def spawn(target: Any, *arguments: Any) -> tuple[Any, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        process.start()
        return process, ours

    server, server_pipe = spawn(serve)
    port = server_pipe.recv()
    stubs, pipe = spawn(follow, port, world_size)
    pipe.recv()
    plugin = StubPlugin(world_size)
    agreement = Agreement(client(port), 0, world_size, cast(library.Plugin, plugin), pipe.send)
    enlist_stubs(port, world_size - 1, agreement.fingerprint)
    while agreement.state == "starting":
        time.sleep(0.01)
    took_s, waited_s, per_rank = [], [], []
    for epoch in range(1, n_changes + 1):
        before = agreement.counters()
        began_s = time.perf_counter()
        agreement.post(Offered(plan(epoch, world_size)))
        ended_s, n_stub_requests, longest_s, n_switched = pipe.recv()
        if n_switched != world_size // RANKS_PER_GROUP + RANKS_PER_GROUP:
            raise RuntimeError(f"change {epoch} switched {n_switched} communicators")
        took_s.append(ended_s - began_s)
        waited_s.append(longest_s)
        time.sleep(1.0)  # rank 0 deletes the answers
        n_requests = n_stub_requests + agreement.counters().n_store_requests - before.n_store_requests
        per_rank.append(n_requests / world_size)
    before = agreement.counters()
    time.sleep(1.0)
    n_at_rest = agreement.counters().n_store_requests - before.n_store_requests
    agreement.close()
    pipe.send("stop")
    server_pipe.send("stop")
    for process in (stubs, server):
        process.join(10)
        process.kill()
    return {
        "took_s": statistics.median(took_s),
        "longest_wait_ms": max(waited_s) * 1e3,
        "requests_per_rank": statistics.median(per_rank),
        "requests_at_rest": n_at_rest,
    }


def boundary_us(n_steps: int = 20_000) -> float:
    """Time of the training thread at the end of a step."""
    plugin = library.load()
    queue: deque[tuple[int, int, float]] = deque(maxlen=4096)
    took_us = []
    for step in range(n_steps):
        began_ns = time.perf_counter_ns()
        queue.append((step, plugin.set_step(step), time.monotonic()))
        took_us.append((time.perf_counter_ns() - began_ns) / 1e3)
    return statistics.median(took_us)


def main() -> None:
    options = options_of(__doc__, quick="fewer changes; under 60 s").parse_args()
    most = measure(N_RANKS, 3 if options.quick else 7)
    report(
        "agreement_scale",
        [
            Result(f"prepared_and_committed_s_{N_RANKS}_ranks", most["took_s"], "s", "<= 2"),
            Result("store_requests_per_change_and_rank", most["requests_per_rank"], "1", "<= 4"),
            Result("store_requests_in_steady_state", most["requests_at_rest"], "1", "<= 0"),
            Result("longest_wait_ms", most["longest_wait_ms"], "ms"),
            Result("boundary_p50_us", boundary_us(), "us", "<= 20"),
        ],
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
