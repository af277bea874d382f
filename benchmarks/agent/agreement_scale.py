"""What agreement costs at scale: thousands of ranks against one real c10d TCPStore.

Rank 0 and one more rank are real `Agreement`s whose boundaries are timed. All others are stubs: sockets
in one process that send the store exactly the requests a rank's background thread sends (wait for the
next message's key, then its value, now and then an acknowledgement). The store runs in a process of its own,
as `torchrun` has it.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import resource
import selectors
import socket
import statistics
import struct
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from benchmarks.lib.reporting import Result, report
from zerotune.agent.agreement import Agreement, Pacing, job_start, pacing_for
from zerotune.agent.agreement.agreement import BOUNDARIES_PER_ACKNOWLEDGEMENT, CONFIRMED_KEY
from zerotune.agent.agreement.plan_table import PlanTable
from zerotune.agent.agreement.protocol import decode_message
from zerotune.store.records import (
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    Plan,
    PlanRow,
    Protocol,
    size_class_range,
)

PREFIX = "zerotune"
INCARNATION = 1
N_ROWS = 100
TIMEOUT = timedelta(seconds=120)
RANKS_PER_NODE = 8
STEP_S = 0.25  # short for thousands of ranks
LOOPBACK = "127.0.0.1"

# c10d's TCPStore protocol: one byte of query, then strings with their length as unsigned 64 bits.
GET, ADD, WAIT = 3, 4, 6
HANDSHAKE = struct.pack("<BI", 0, 0x3C85F7CE)


def text(key: str) -> bytes:
    data = f"/{PREFIX}/{INCARNATION}/{key}".encode()
    return struct.pack("<Q", len(data)) + data


class StubRank:
    """One connection that reads each message as a rank does. States: waiting, reading, counting."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((LOOPBACK, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(HANDSHAKE)
        self.state = ""
        self.key = ""
        self.buffer = b""
        self.n_requests = 0
        self.n_agreed = 0

    def wait(self, key: str) -> None:
        self.state, self.key, self.buffer = "waiting", key, b""
        self._send(struct.pack("<BQ", WAIT, 1) + text(key))

    def acknowledge(self) -> None:
        self.state = "counting"
        self._send(struct.pack("<B", ADD) + text(f"read/{self.n_agreed}") + struct.pack("<q", 1))

    def on_data(self) -> bytes | None:
        """The value, once it is complete."""
        self.buffer += self.socket.recv(1 << 20)
        if self.state == "waiting":
            self.state, self.buffer = "reading", b""
            self._send(struct.pack("<B", GET) + text(self.key))
        elif self.state == "reading" and len(self.buffer) >= 8:
            (n_bytes,) = struct.unpack_from("<Q", self.buffer)
            if len(self.buffer) == 8 + n_bytes:
                return self.buffer[8:]
        return None

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
    while pipe.recv() == "usage":
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(usage.ru_utime + usage.ru_stime)


def follow_messages(port: int, n_stubs: int, pipe: Connection) -> None:
    """All stub ranks: read message after message until told to stop, then send what it took.

    Args:
        port: of the job's store.
        n_stubs: ranks that only read messages.
        pipe: gets "connected"; then answers "count" by (requests, milliseconds from the first reader to the last), ends
            at "stop".
    """
    raise_file_limit()
    stubs = [StubRank(port) for _ in range(n_stubs)]
    selector = selectors.DefaultSelector()
    for stub in stubs:
        selector.register(stub.socket, selectors.EVENT_READ, stub)
    pipe.send("connected")
    pipe.recv()
    for stub in stubs:
        stub.wait(job_start.FIRST_MESSAGE_KEY)
    spread_ms: list[float] = []
    arrivals: dict[str, list[float]] = {}
    while True:
        if pipe.poll(0):
            if pipe.recv() == "stop":
                return
            pipe.send((sum(stub.n_requests for stub in stubs), spread_ms))
            spread_ms = []
        for key, _ in selector.select(0.05):
            stub = key.data
            if stub.state == "counting":
                stub.socket.recv(8)
                stub.wait(stub.key)
                continue
            value = stub.on_data()
            if value is None:
                continue
            times = arrivals.setdefault(stub.key, [])
            times.append(time.perf_counter())
            if len(times) == n_stubs:
                spread_ms.append((times[-1] - times[0]) * 1e3)
                del arrivals[stub.key]
            stub.n_agreed += 1
            next_key = f"boundary/{decode_message(value).next_boundary}"
            if stub.n_agreed % BOUNDARIES_PER_ACKNOWLEDGEMENT == 0:
                stub.key = next_key
                stub.acknowledge()
            else:
                stub.wait(next_key)


class StubPlugin:
    """Plans cost nothing here: the plugin has benchmarks of its own."""

    def __init__(self) -> None:
        self.loaded = self.active = 0

    def load_plan(self, plan: Plan) -> None:
        self.loaded = plan.epoch

    def flip(self, epoch: int) -> bool:
        self.active = epoch
        return True

    def active_epoch(self) -> int:
        return self.active


def plan(epoch: int) -> Plan:
    candidate = Candidate(Algorithm.ring, Protocol.simple, 16)
    rows = tuple(
        PlanRow(
            CommunicatorClass(4096, 512), Collective.all_gather, Phase.forward_gather, *size_class_range(i), candidate
        )
        for i in range(40, 40 + N_ROWS)
    )
    return Plan(epoch, rows)


def client(port: int) -> dist.Store:
    return dist.PrefixStore(PREFIX, dist.TCPStore(LOOPBACK, port, None, False, TIMEOUT, wait_for_workers=False))


def train(port: int, rank: int, world_size: int, step_s: float, pacing: Pacing, pipe: Connection) -> None:
    """A real rank: crosses boundaries as ordered and answers with figures of each.

    Args:
        port: of the job's store.
        rank: of this process, 0 or 1.
        world_size: of the job, stubs included.
        step_s: time between boundaries.
        pacing: distance of agreed boundaries.
        pipe: brings (mode, number of boundaries) and takes a dict; mode is "warm", "changing" or "quiet"; None ends it.
    """
    plugin = StubPlugin()
    agreement = Agreement(client(port), rank, world_size, PlanTable(plugin), lambda: 0, pacing=pacing)
    pipe.send(agreement.fingerprint)
    epoch = 0
    while (order := pipe.recv()) is not None:
        mode, n_boundaries = order
        n_requests, n_agreed, n_waits = agreement.n_store_requests, agreement.n_agreed, agreement.n_waits
        all_us, agreed_us = [], []
        while n_boundaries > 0:
            if mode == "changing" and plugin.active == epoch:
                epoch += 1
                agreement.offer(plan(epoch))
            time.sleep(step_s)
            n_before = agreement.n_agreed
            start_ns = time.perf_counter_ns()
            agreement.boundary()
            took_us = (time.perf_counter_ns() - start_ns) / 1e3
            all_us.append(took_us)
            if agreement.n_agreed > n_before:
                agreed_us.append(took_us)
            # Warming up ends when the ranks have started and confirmed that they are in step.
            n_boundaries -= 1 if mode != "warm" or agreement.n_agreed > 3 else 0
        pipe.send(
            {
                "boundary_us": all_us,
                "agreed_us": agreed_us,
                "n_requests": agreement.n_store_requests - n_requests,
                "n_agreed": agreement.n_agreed - n_agreed,
                "n_waits": agreement.n_waits - n_waits,
                "n_adopted": epoch,
            }
        )
    agreement.close()


def enlist_stubs(port: int, n_stubs: int, fingerprint: str) -> None:
    """Take the stubs through the job start and the lockstep check, which happen once per job.

    Args:
        port: of the job's store.
        n_stubs: ranks 2 and up.
        fingerprint: of the real ranks.
    """
    store = dist.PrefixStore(str(INCARNATION), client(port))
    for rank in range(2, 2 + n_stubs):
        store.set(job_start.promise_key(rank), "2")
    store.add(CONFIRMED_KEY, n_stubs)
    store.add(job_start.member_key(fingerprint), n_stubs)
    store.add(job_start.all_key(2 + n_stubs), n_stubs)


def measure(
    world_size: int, pacing: Pacing, step_s: float, n_boundaries: int, modes: tuple[str, ...] = ("changing", "quiet")
) -> dict[str, dict[str, float]]:
    """What boundaries cost a job in which two ranks are real and the others only read messages.

    Args:
        world_size: of the job, stubs included.
        pacing: distance of agreed boundaries.
        step_s: time between boundaries.
        n_boundaries: measured in each mode.
        modes: "changing": plans change all the time; "quiet": none does.

    Returns:
        Figures by mode.
    """
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    processes = []

    def spawn(target: Any, *args: Any) -> Connection:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=target, args=(*args, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
        return ours

    server = spawn(serve)
    port = server.recv()
    stubs = spawn(follow_messages, port, world_size - 2)
    stubs.recv()
    ranks = [spawn(train, port, rank, world_size, step_s, pacing) for rank in range(2)]
    fingerprint, _ = (pipe.recv() for pipe in ranks)
    enlist_stubs(port, world_size - 2, fingerprint)
    stubs.send("start")
    figures = {}
    for mode in ("warm", *modes):
        before_s = ask(server, "usage")
        requests_before, _ = ask(stubs, "count")
        for pipe in ranks:
            pipe.send((mode, n_boundaries if mode != "warm" else 1))
        leader, follower = (pipe.recv() for pipe in ranks)
        requests, spread_ms = ask(stubs, "count")
        store_s = ask(server, "usage") - before_s
        n_requests = requests - requests_before + leader["n_requests"] + follower["n_requests"]
        n_seen = len(follower["boundary_us"])
        figures[mode] = {
            "boundary_p50_us": statistics.median(follower["boundary_us"]),
            "boundary_p99_us": sorted(follower["boundary_us"])[int(0.99 * n_seen)],
            "agreed_p50_us": statistics.median(follower["agreed_us"] or [0.0]),
            "leader_agreed_p50_us": statistics.median(leader["agreed_us"] or [0.0]),
            "n_boundaries": n_seen,
            "n_agreed": follower["n_agreed"],
            "n_waits": follower["n_waits"],
            "requests_per_boundary": n_requests / n_seen,
            "store_cpu_us_per_request": store_s * 1e6 / max(1, n_requests),
            "spread_ms": statistics.median(spread_ms or [0.0]),
        }
    for pipe in ranks:
        pipe.send(None)
    for process in processes[2:]:
        process.join(10)
    stubs.send("stop")
    server.send("stop")
    for process in processes:
        process.join(10)
        process.kill()
    return figures


def ask(pipe: Connection, question: str) -> Any:
    pipe.send(question)
    return pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end in one line of JSON")
    parser.add_argument("--quick", action="store_true", help="4,096 ranks as shipped, plans changing; under 60 s")
    options = parser.parse_args()
    n_boundaries = 64 if options.quick else 160
    modes = ("changing",) if options.quick else ("changing", "quiet")
    every = Pacing(base=1, limit=1)
    runs: list[tuple[str, int, Pacing, tuple[str, ...]]] = [("4096 ranks, as shipped", 4096, pacing_for(4096), modes)]
    if not options.quick:
        runs += [
            ("1024 ranks, as shipped", 1024, pacing_for(1024), modes),
            ("4096 ranks, every boundary", 4096, every, ("changing",)),
            ("one reader per node (512), every boundary", 4096 // RANKS_PER_NODE, every, ("changing",)),
            ("tree, a reader per 8 nodes (64), every one", 4096 // RANKS_PER_NODE**2, every, ("changing",)),
        ]
    table = {}
    print(
        f"{'run':42} {'mode':9} {'boundary':>9} {'p99':>8} {'agreed':>7} {'waits':>6} "
        f"{'requests/':>9} {'store CPU':>9} {'spread':>7}"
    )
    print(f"{'':42} {'':9} {'p50 us':>9} {'us':>8} {'p50 us':>7} {'':>6} {'boundary':>9} {'us/req':>9} {'ms':>7}")
    for name, world_size, pacing, wanted in runs:
        figures = table[name] = measure(world_size, pacing, STEP_S, n_boundaries, wanted)
        for mode in wanted:
            f = figures[mode]
            print(
                f"{name:42} {mode:9} {f['boundary_p50_us']:9.1f} {f['boundary_p99_us']:8.0f} "
                f"{f['agreed_p50_us']:7.0f} {f['n_waits']:2.0f}/{f['n_agreed']:3.0f} "
                f"{f['requests_per_boundary']:9.0f} {f['store_cpu_us_per_request']:9.1f} {f['spread_ms']:7.0f}",
                flush=True,
            )
    changing = table["4096 ranks, as shipped"]["changing"]
    report(
        "agreement_scale",
        [
            Result("boundary_p50_us_4096_ranks", changing["boundary_p50_us"], "us", "<= 50"),
            Result("agreed_p50_us_4096_ranks", changing["agreed_p50_us"], "us", "<= 50"),
            Result("store_requests_per_boundary_4096_ranks", changing["requests_per_boundary"], "1"),
        ],
        as_json=options.json,
    )


if __name__ == "__main__":
    main()
