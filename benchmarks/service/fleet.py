"""A fleet of a thousand nodes: what it costs the daemon that leads a job of all of them, and what a new node has of it.

* leader_cpu_cores_1000_nodes, leader_mib_1000_nodes: of a real daemon that leads one job. The other nodes' daemons
  forward 40 collectives per second each, over encrypted connections on loopback; its ranks train in steps of 5 s. CPU
  seconds per second of that traffic, however busy the machine is, and the most memory held. leader_measured_share of
  the calls became measurements: less than 1, and it did not keep up.
* object_writes_per_s: objects that the writers of all nodes put into a directory, each at its own moment of a minute
  (of 200 nodes in five seconds with --quick, at a higher rate so); object_write_p99_ms of one, and lost_rows.
* steps_to_book_plan: a book of these objects is built and signed, and a daemon that never measured anything reads it.
  In which step of a job (steps of half a second) a setting runs that won elsewhere.
* book_rows_per_s, book_peak_mib: of ten million rows (a million with --quick), built by `zerotune store book build`
  as a process of its own, from objects of 200,000 rows of many nodes.

With --nodes N the metrics are named for N nodes. Run: python -m benchmarks fleet [--quick] [--json] [--nodes N]
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import psutil
import zmq

from benchmarks.lib.argument_types import whole
from benchmarks.lib.fleet.fleet_nodes import (
    CALLS_PER_S,
    JOB,
    RANKS_PER_NODE,
    REPORT_S,
    STEP_S,
    FirstNode,
    Job,
    OtherNode,
)
from benchmarks.lib.fleet.fleet_objects import ROWS_PER_OBJECT, object_of
from benchmarks.lib.fleet.fleet_rows import signer_of
from benchmarks.lib.free_port import free_port
from benchmarks.lib.reporting import Result, options_of, report, say
from benchmarks.lib.simulated.brain_world import Call, World
from zerotune.agent.nccl import fabric
from zerotune.store import wire
from zerotune.store.records import (
    BASELINE,
    Candidate,
    Collective,
    DecisionKey,
    Outcome,
    Phase,
    Plan,
    Source,
    TimingSource,
    size_class,
)
from zerotune.store.sqlite.database import Store
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.signing import Signer, make_key, public_path
from zerotune.tuner.fleet.storage import Storage
from zerotune.tuner.fleet.writer import FleetWriter
from zerotune.tuner.join import OBSERVATION
from zerotune.tuner.modeling.cost_prior import CostPrior

N_NODES: Final = 1000
TRAFFIC_S, TRAFFIC_S_QUICK = 120, 10
WRITE_EVERY_S, WRITE_EVERY_S_QUICK = 60.0, 5.0
N_WRITERS_QUICK: Final = 200
"""Each a thread of this process; in five seconds they write more objects a second than a thousand in a minute."""
N_STEPS: Final = 30
BOOK_ROWS: Final = 10_000_000
BOOK_ROWS_QUICK: Final = 1_000_000
ZEROTUNE = (sys.executable, "-m", "zerotune.tuner.cli")
BOOK_MEMORY_MB: Final = 4096
N_DIFFERENT: Final = 48
"""Jobs whose measurements are drawn anew; the others are these again, on faster or slower networks."""
FABRIC: Final = "ethernet_boxes"
"""Of the jobs whose settings are known, so that a book of them can be right."""
WAIT_S: Final = 120.0
NEW_STEP_S: Final = 0.5
MOST_STEPS: Final = 40
NEW_JOB: Final = "new"


@contextlib.contextmanager
def daemon(folder: Path, *words: object) -> Iterator[psutil.Process]:
    """A daemon at `folder`/d.sock with a store beside it."""
    endpoint = f"ipc://{folder}/d.sock"
    command = [*ZEROTUNE, "daemon", "--endpoint", endpoint]
    command += ["--store", str(folder / "store.db"), *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + WAIT_S
            while fetch_status(endpoint, 0.5) is None:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit("the daemon did not start")
                time.sleep(0.05)
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


# ---- the leading daemon ----------------------------------------------------------------------------------------


def lead(folder: Path, n_nodes: int, traffic_s: int) -> list[Result]:
    """What leading a job costs."""
    keys, port = folder / "keys", free_port()
    subprocess.run([*ZEROTUNE, "daemon", "keys", str(keys)], check=True, capture_output=True)
    listen = f"tcp://127.0.0.1:{port}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * n_nodes + 100)
    with daemon(folder, "--listen", listen, "--curve-keys", keys) as leader:
        endpoint = f"ipc://{folder}/d.sock"
        first = FirstNode(context, endpoint, n_nodes * RANKS_PER_NODE)
        others = [OtherNode(context, keys, listen, number) for number in range(1, n_nodes)]
        _meet(endpoint, first, others, n_nodes)
        say(f"{n_nodes:,} nodes are connected")
        job, at_s, step, peak_bytes = Job(n_nodes), time.monotonic(), 1, 0
        busy_s, sent_before = _cpu_s(leader), sum(one.n_unsent for one in others)
        for second in range(0, traffic_s, REPORT_S):
            first.greet()
            calls, waits = job.calls(CALLS_PER_S * REPORT_S, step, first.plan)
            first.report(calls, waits)
            for number, other in enumerate(others):
                other.greet()
                other.report(calls, waits)
                if number % 50 == 0:  # daemons do not report at the same moment
                    time.sleep(max(0.0, at_s + second + REPORT_S * number / n_nodes - time.monotonic()))
            if (second + REPORT_S) % STEP_S == 0:
                first.finish(step)
                step += 1
            peak_bytes = max(peak_bytes, leader.memory_info().rss)
        n_measured = _wait_measured(folder / "store.db", job.n_calls, first)
        busy_s = _cpu_s(leader) - busy_s
        n_unsent = sum(one.n_unsent for one in others) - sent_before
        peak_bytes = max(peak_bytes, leader.memory_info().rss)
        first.leave()
        for other in others:
            other.leave()
    context.destroy(linger=500)
    return [
        Result(f"leader_cpu_cores_{n_nodes}_nodes", busy_s / traffic_s, "cores", "<= 1"),
        Result(f"leader_mib_{n_nodes}_nodes", peak_bytes / 2**20, "MiB", "<= 1024"),
        Result("leader_measured_share", n_measured / job.n_calls, "", ">= 0.99"),
        Result("leader_records_per_cpu_s", job.n_calls * (n_nodes - 1 + RANKS_PER_NODE) / busy_s, "1/s of CPU"),
        Result("unsent_messages", n_unsent, "messages"),
    ]


def _meet(endpoint: str, first: FirstNode, others: list[OtherNode], n_nodes: int) -> None:
    """Until the leading daemon knows all ranks."""
    deadline_s, n_seen = time.monotonic() + WAIT_S, 0
    while time.monotonic() < deadline_s:
        first.greet()
        for other in others:
            other.greet()
        status = fetch_status(endpoint, 5.0)
        n_seen = next((job.n_ranks_seen for job in (status.jobs if status else ()) if job.job_id == JOB), 0)
        if n_seen == n_nodes * RANKS_PER_NODE:
            return
        time.sleep(0.2)
    raise SystemExit(f"only {n_seen:,} of {n_nodes * RANKS_PER_NODE:,} ranks were seen in {WAIT_S:.0f} s")


def _wait_measured(path: Path, n_calls: int, first: FirstNode) -> int:
    """Measurements in the store, once they are all there or no more come."""
    n_measured, changed_s = 0, time.monotonic()
    while n_measured < n_calls and time.monotonic() < changed_s + 10.0:
        first.greet()
        time.sleep(0.5)
        with Store.open(path, read_only=True) as store:
            n_now = sum(store.measured().values())
        if n_now > n_measured:
            n_measured, changed_s = n_now, time.monotonic()
    return n_measured


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# ---- what all nodes write -----------------------------------------------------------------------------------


def small_world(seed: int) -> World:
    """A job of 16 ranks that gathers and scatters messages of four sizes, and computes for two seconds."""
    place = fabric.load(FABRIC).communicator(range(16))
    calls = [
        Call(collective, phase, 1 << exponent)
        for exponent in (18, 20, 22, 24)
        for collective, phase in (
            (Collective.all_gather, Phase.forward_gather),
            (Collective.reduce_scatter, Phase.gradient_scatter),
        )
    ]
    return World(FABRIC, place, calls, seed=seed, compute_us=2_000_000.0)


def tried_by(number: int) -> npt.NDArray[np.void]:
    """What one node's job measured (MEASUREMENT): NCCL's own choice in every other step, in the others two settings."""
    world, blocks = small_world(number), []
    costs = CostPrior(world.fabric.describe())
    offered = {call: costs.candidates(world.communicator, call.collective) for call in world.calls}

    def chosen(call: Call) -> Candidate:
        nth = 2 * number + world.step // 2 % 2
        return BASELINE if world.step % 2 else offered[call][nth % len(offered[call])]

    world.fixed = chosen
    for _ in range(N_STEPS):
        blocks.append(world.run_step()[0])
    found = np.concatenate(blocks)
    found["source"], found["outcome"] = Source.live, Outcome.ok
    return found


class TimedStorage(Storage):
    """Remembers how long each write took."""

    def __init__(self, url: str) -> None:
        super().__init__(url, writes=True)
        self.took_s: list[tuple[float, float]] = []
        """When each ended, and how long it took."""

    def put(self, path: str, data: bytes) -> None:
        """Write, and look at the clock."""
        begun_s = time.monotonic()
        super().put(path, data)
        self.took_s.append((time.monotonic(), time.monotonic() - begun_s))


def write(url: Path, n_nodes: int, n_writers: int, every_s: float) -> list[Result]:
    """Nodes' writers at work, each with what its job measured, for one round."""
    where, storage = fabric.load(FABRIC), TimedStorage(str(url))
    made, random = [tried_by(number) for number in range(N_DIFFERENT)], np.random.default_rng(0)
    writers, begun_s = [], time.monotonic()
    for number in range(n_writers):
        time.sleep(max(0.0, begun_s + every_s * number / n_writers - time.monotonic()))
        writers.append(FleetWriter(storage, name := f"node{number}", signer_of(name), write_every_s=every_s))
        block = made[number % N_DIFFERENT].copy()
        block["duration_us"] *= random.lognormal(random.normal(0.0, 0.1), 0.01, len(block))
        writers[-1].measured(where.fabric_id, where.describe(), f"job{number}", block)
    deadline_s = time.monotonic() + every_s + WAIT_S
    while any(one.state.n_waiting for one in writers) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    states = [one.state for one in writers]
    threads = [threading.Thread(target=one.close) for one in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended_s, took_s = np.array(storage.took_s).T
    per_s = (len(ended_s) - 1) / (ended_s.max() - ended_s.min())
    return [
        Result("object_writes_per_s", per_s, "1/s", f">= {0.95 * n_nodes / 60:.4g}"),
        Result("object_write_p99_ms", float(np.percentile(took_s, 99)) * 1000, "ms"),
        Result("lost_rows", sum(len(made[0]) - one.n_written for one in states), "rows", "0"),
    ]


# ---- what a new node has of it ------------------------------------------------------------------------------


def start_with_book(folder: Path, url: Path) -> list[Result]:
    """Steps of a job under a daemon without a store, until a setting of the book runs."""
    make_key(folder / "key")
    built = build(str(url), folder / "book", signer=Signer.from_file(folder / "key"))
    told = {(one.key, one.candidate) for one in built.book.winners()}
    with daemon(folder, "--book", folder / "book", "--book-key", public_path(folder / "key")):
        at = _first_step_of(told, f"ipc://{folder}/d.sock")
    return [
        Result("book_winners", len(told), "settings", "> 0"),
        Result("steps_to_book_plan", at, "steps", "<= 10"),
    ]


def _first_step_of(told: set[tuple[DecisionKey, Candidate]], endpoint: str) -> int:
    """In which step, counted from 1, one of the settings runs; `MOST_STEPS` where none does."""
    world = small_world(99)
    with zmq.Context() as context:
        ranks = SmallJob(context, endpoint, world)
        for _ in range(MOST_STEPS):
            ranks.step()
            for call in world.calls:
                key = DecisionKey(world.communicator, call.collective, call.phase, size_class(call.message_bytes))
                if (key, world.chosen(call)) in told:
                    ranks.leave()
                    return world.step
        ranks.leave()
    return MOST_STEPS


class SmallJob:
    """The ranks of a job under one daemon: frames as agents send them, a report with each step."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, world: World) -> None:
        self._world, self._n_calls = world, 0
        self._sockets = [context.socket(zmq.DEALER) for _ in range(world.communicator.n_ranks)]
        for socket in self._sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
        self._is_observing = False
        self._plan: Plan | None = None
        self._greet()
        time.sleep(NEW_STEP_S)  # a job's first step passes before its ranks have met

    def step(self) -> None:
        """Adopt what was offered, run a step, report it."""
        world = self._world
        if self._plan is not None:
            world.plan, world.adopted_at, self._plan = self._plan, world.step, None
            self._send(0, wire.Adopted(NEW_JOB, world.plan.epoch, world.step))
        elif (later := world.plan.at(world.step - world.adopted_at)) is not world.plan:
            world.plan, world.adopted_at = later, world.step
            self._send(0, wire.Adopted(NEW_JOB, later.epoch, world.step))
        block, record = world.run_step()
        if self._is_observing:
            self._report(block)
        self._send(0, wire.Steps(NEW_JOB, 0, (record,)))
        time.sleep(NEW_STEP_S)
        self._greet()

    def leave(self) -> None:
        """All say goodbye."""
        for rank, socket in enumerate(self._sockets):
            self._send(rank, wire.Goodbye(NEW_JOB, rank))
            socket.close(linger=500)

    def _report(self, block: npt.NDArray[np.void]) -> None:
        seen = np.zeros(len(block), OBSERVATION)
        for name in set(seen.dtype.names or ()) & set(block.dtype.names or ()):
            seen[name] = block[name]
        seen["comm_id"], seen["sequence"] = 1, np.arange(self._n_calls, self._n_calls + len(block))
        matched = np.where(block["is_default"], 0, wire.FLAG_MATCHED)
        seen["flags"], seen["timing_source"] = wire.FLAG_TIMED | matched, TimingSource.emulated
        self._n_calls += len(block)
        for rank in range(len(self._sockets)):
            seen["rank"] = rank
            self._send(rank, wire.Observations(NEW_JOB, rank, len(seen)), seen.tobytes())

    def _greet(self) -> None:
        world = self._world
        facts = {**world.fabric.describe(), "emulated": FABRIC}
        for rank, socket in enumerate(self._sockets):
            hello = wire.Hello(
                NEW_JOB, rank, len(self._sockets), 0, f"node{rank}", os.getpid(), world.fabric.fabric_id, facts,
                22809, 5, world.plan.epoch,
            )  # fmt: skip
            self._send(rank, hello)
            while socket.poll(0):
                message = wire.decode_daemon(socket.recv_multipart())
                if isinstance(message, wire.Observe):
                    self._is_observing = message.n_steps > 0
                elif isinstance(message, wire.PlanOffer):
                    self._plan = message.plan

    def _send(self, rank: int, message: wire.AgentMessage, records: bytes | None = None) -> None:
        self._sockets[rank].send_multipart(wire.encode(message, records))


# ---- a book of more than that -------------------------------------------------------------------------------


def merge(folder: Path, n_rows: int) -> list[Result]:
    """How fast `zerotune store book build` merges, and in how much memory."""
    objects = str(folder / "fleet")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for one in [pool.submit(_make_object, objects, at) for at in range(n_rows // ROWS_PER_OBJECT)]:
            one.result()
    command = [*ZEROTUNE, "store", "book", "build", objects, "--memory-mb", str(BOOK_MEMORY_MB)]
    begun_s = time.monotonic()
    process = subprocess.Popen([*command, "--out", str(folder / "fleet.book")], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"book build ended with exit code {process.returncode}")
    return [
        Result("book_rows_per_s", n_rows / (time.monotonic() - begun_s), "rows/s"),
        Result("book_peak_mib", usage.ru_maxrss / 1024, "MiB", "<= 8192"),
    ]


def _make_object(url: str, at: int) -> None:
    Storage(url, writes=True).put(*object_of(at, ROWS_PER_OBJECT))


def main() -> None:
    """Entry point."""
    parser = options_of(__doc__, quick="seconds of traffic, few writers; ends within 60 s")
    nodes = whole(8, wire.MAX_RANK // RANKS_PER_NODE)
    parser.add_argument("--nodes", type=nodes, default=N_NODES, help=f"how many (default: {N_NODES:,})")
    arguments = parser.parse_args()
    traffic_s, every_s = (TRAFFIC_S_QUICK, WRITE_EVERY_S_QUICK) if arguments.quick else (TRAFFIC_S, WRITE_EVERY_S)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if 4 * arguments.nodes + 100 > most:
        parser.error(f"--nodes {arguments.nodes}: this user may have {most} files open at most (`ulimit -Hn`)")
    with tempfile.TemporaryDirectory() as name:
        leading, new = Path(name, "l"), Path(name, "n")
        leading.mkdir(mode=0o700)
        new.mkdir(mode=0o700)
        results = lead(leading, arguments.nodes, traffic_s)
        n_writers = min(arguments.nodes, N_WRITERS_QUICK) if arguments.quick else arguments.nodes
        results += write(Path(name, "fleet"), arguments.nodes, n_writers, every_s)
        results += start_with_book(new, Path(name, "fleet"))
        results += merge(Path(name, "rows"), BOOK_ROWS_QUICK if arguments.quick else BOOK_ROWS)
    report("fleet", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
