"""How much one daemon on one core takes in, and how soon it answers meanwhile.

Run: python -m benchmarks daemon_load [--quick] [--json]

Observations of 64 ranks count once their joined measurements are committed. `plan_latency_p99_ms` is the time from a
step to its plan at half that load, in a job with a new plan at every step. `thinking_p99_ms` is the brain's time for a
plan of 1,000 keys. `observations_per_cpu_s` suits shared machines: it is over the daemon's processor time.
"""

from __future__ import annotations

import argparse
import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import zmq

from benchmarks.lib.reporting import Result, options_of, report
from benchmarks.lib.simulated.brain_world import Call, World
from zerotune.store import wire
from zerotune.store.records import (
    Collective,
    CommunicatorClass,
    Exposure,
    MissingEvidence,
    Phase,
    Plan,
    Stage,
    StepRecord,
    size_class,
    size_class_floor,
)
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.store.wire import FLAG_MATCHED, FLAG_TIMED
from zerotune.tuner.client.status import fetch_status
from zerotune.tuner.join import OBSERVATION
from zerotune.tuner.learning.policy.memory import MemoryGate

N_JOBS, N_RANKS = 8, 8
RECORDS_PER_MESSAGE = 128
LOAD_SHARE = 0.5
"""Of the daemon's throughput: the load while latencies are measured."""
N_KEYS = 1000
THINKING_EVERY_S = 0.2
"""A step of the job with many keys."""
SIZES_BYTES = np.array([1 << 20, 1 << 22, 5 << 20, 1 << 24, 25 << 20, 1 << 26], np.uint64)
PROBE_EVERY_S = 0.01
ROUNDS_IN_FLIGHT = 4


class EagerBrain:
    """Proposes a new plan at every step, at once, so that only the daemon's own latency is measured."""

    knowledge: object = None
    stage = Stage.unknown
    missing_evidence = MissingEvidence.nothing
    exposure = Exposure()
    memory = MemoryGate(1.0)
    n_explored = 0
    spent_percent = 0.0

    def __init__(self) -> None:
        self._epoch = 0
        self._proposed = 0

    def step_finished(self, step: StepRecord) -> None:
        self._epoch = step.step

    def propose(self) -> Plan | None:
        if self._proposed == self._epoch:
            return None
        self._proposed = self._epoch
        return Plan(self._epoch)

    def decisions(self) -> list[Any]:
        return []

    def ignore(self, *_: object) -> None:
        pass

    observe = cost_tables = sequence = adopted = ignore


def serve(endpoint: str, store_path: str) -> int:
    """The daemon process: the real brain for every job but the probe. Prints the duration of each thought (ms)."""
    import scipy.special  # noqa: F401 - a daemon's learner loads it with a job's knowledge

    from zerotune.tuner.learning.brain import Brain, BrainSettings
    from zerotune.tuner.learning.knowledge import Knowledge
    from zerotune.tuner.service.serving import run_daemon

    thought_ms: list[float] = []

    class TimedBrain(Brain):
        def propose(self) -> Plan | None:
            start_s = time.perf_counter()
            plan = super().propose()
            if self.job_id == "thinker":
                thought_ms.append((time.perf_counter() - start_s) * 1000)
            return plan

    def brains(job_id: str, fabric_id: str, fabric: Mapping[str, Any], knowledge: object, _: object) -> Any:
        if job_id == "probe":
            return EagerBrain()
        return TimedBrain(job_id, fabric_id, fabric, Knowledge(), BrainSettings(), time.time)

    code = run_daemon(endpoint, store_path, brains=brains, load_knowledge=lambda *_: Knowledge())
    print(*thought_ms, flush=True)
    return code


class Thinker:
    """The ranks of a job whose steps have N_KEYS calls, each of another key; they adopt offered plans."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        collectives = (Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce, Collective.broadcast)
        kinds = [(collective, phase) for collective in collectives for phase in Phase]
        classes = range(size_class(1 << 14), size_class(1 << 14) + N_KEYS // len(kinds))
        sizes_bytes = [-(-size_class_floor(one) // 128) * 128 for one in classes]
        calls = [Call(collective, phase, n_bytes) for collective, phase in kinds for n_bytes in sizes_bytes]
        self.world = World("h100_node", CommunicatorClass(2, 1), calls)
        self.sockets = [context.socket(zmq.DEALER) for _ in range(2)]
        for socket in self.sockets:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)

    def step(self) -> int:
        """Run a step, report it, and adopt the offer; returns its number of observations."""
        told, record = self.world.run_step()
        block = np.zeros(len(told), OBSERVATION)
        for name in sorted({*(MEASUREMENT.names or ())} & {*(OBSERVATION.names or ())}):
            block[name] = told[name]
        block["comm_id"], block["sequence"] = 7, record.step * len(block) + np.arange(len(block))
        block["start_ns"] = time.monotonic_ns()
        block["flags"] = FLAG_TIMED | np.where(told["is_default"], 0, FLAG_MATCHED)
        facts = {**self.world.fabric.describe(), "emulated": self.world.fabric_name}
        for rank, socket in enumerate(self.sockets):
            hello = wire.Hello("thinker", rank, 2, rank, "node", os.getpid(), "h100_node", facts, 0, 5)
            socket.send_multipart(wire.encode(hello))
            block["rank"] = rank
            socket.send_multipart(wire.encode(wire.Observations("thinker", rank, len(block)), block.tobytes()))
        self.sockets[0].send_multipart(wire.encode(wire.Steps("thinker", 0, (record,))))
        for socket in self.sockets:
            while socket.poll(0):
                message = wire.decode_daemon(socket.recv_multipart())
                if isinstance(message, wire.PlanOffer):
                    self.world.plan = message.plan
                    adopted = wire.Adopted("thinker", message.plan.epoch, self.world.step)
                    socket.send_multipart(wire.encode(adopted))
        return len(self.sockets) * len(block)


class Load:
    """64 connected ranks in one thread; ranks of a job report the same collectives."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.sequence = 0
        self.epochs = [0] * N_JOBS
        self._rng = np.random.default_rng(0)
        self._step = 0
        self.n_unread = [0] * N_JOBS
        self.sockets = [[context.socket(zmq.DEALER) for _ in range(N_RANKS)] for _ in range(N_JOBS)]
        for job, ranks in enumerate(self.sockets):
            for rank, socket in enumerate(ranks):
                socket.setsockopt(zmq.SNDHWM, 16)
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(endpoint)
                self.hello(job, rank)

    def hello(self, job: int, rank: int) -> None:
        facts: dict[str, str | int | float | bool] = {"gpu": "none", "benchmark": "daemon_load"}
        message = wire.Hello(f"job-{job}", rank, N_RANKS, rank, "node", os.getpid(), f"fabric-{job}", facts, 0, 5)
        self.sockets[job][rank].send_multipart(wire.encode(message))

    def round(self, duration_s: float = 0.0) -> int:
        """One message of every rank, jobs spread over `duration_s`; returns the number of observations."""
        start_s = time.monotonic()
        n = RECORDS_PER_MESSAGE
        block = np.zeros(n, OBSERVATION)
        block["sequence"] = np.arange(self.sequence, self.sequence + n)
        self.sequence += n
        self._step += 1
        block["step"] = self._step
        block["message_bytes"] = np.tile(SIZES_BYTES, n)[:n]
        block["collective"] = np.where(np.arange(n) % 3 == 2, 3, 2)
        block["phase"] = np.where(np.arange(n) % 3 == 2, 3, 1 + np.arange(n) % 2)
        block["start_ns"] = self._step * 10**7 + np.arange(n) * 10**4
        block["n_ranks"], block["n_nodes"] = N_RANKS, 1
        block["algorithm"], block["protocol"], block["n_channels"] = 1, 2, 16
        block["timing_source"], block["flags"], block["memory_pressure"] = 1, FLAG_TIMED, 0.5
        for job, ranks in enumerate(self.sockets):
            block["comm_id"], block["epoch"] = 1000 + job, self.epochs[job]
            base_us = block["message_bytes"] / 2e5 * self._rng.lognormal(0, 0.03, n)
            for rank, socket in enumerate(ranks):
                block["duration_us"] = base_us + self._rng.exponential(5.0, n)
                block["rank"] = rank
                message = wire.Observations(f"job-{job}", rank, n)
                socket.send_multipart(wire.encode(message, block.tobytes()))
            step = wire.Steps(f"job-{job}", 0, (StepRecord(self._step, self.epochs[job], 1e5),))
            ranks[0].send_multipart(wire.encode(step))
            time.sleep(max(0.0, start_s + duration_s * (job + 1) / N_JOBS - time.monotonic()))
        return n * N_JOBS * N_RANKS

    def answer(self, limit: int = 0) -> None:
        """Adopt the offered plans and send Hello again; wait while more than `limit` of these are unread."""
        for job, ranks in enumerate(self.sockets):
            self.hello(job, 0)
            self.n_unread[job] += 1
            while ranks[0].poll(-1 if self.n_unread[job] > limit else 0):
                message = wire.decode_daemon(ranks[0].recv_multipart())
                if isinstance(message, wire.Welcome):
                    self.n_unread[job] -= 1
                elif isinstance(message, wire.PlanOffer):
                    self.epochs[job] = message.plan.epoch
                    adopted = wire.Adopted(f"job-{job}", message.plan.epoch, self._step + 1)
                    ranks[0].send_multipart(wire.encode(adopted))

    def keep_alive(self) -> None:
        """The other ranks send Hello too, and discard the answers."""
        for job, ranks in enumerate(self.sockets):
            for rank, socket in enumerate(ranks[1:], start=1):
                self.hello(job, rank)
                while socket.poll(0):
                    socket.recv_multipart()


def start(mode: str, *arguments: str, core: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.service.daemon_load", mode, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, preexec_fn=lambda: os.sched_setaffinity(0, {core}), env=environment, stdout=subprocess.PIPE
    )
    atexit.register(process.kill)  # no daemon is left behind after an error
    return process


def wait_for(endpoint: str) -> None:
    while fetch_status(endpoint, 0.5) is None:
        time.sleep(0.05)


def n_stored(path: Path) -> int:
    with Store.open(path, read_only=True) as store:
        return int(store._reader().execute("SELECT coalesce(max(id), 0) FROM measurements").fetchone()[0])


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def throughput(
    context: zmq.Context[zmq.Socket[bytes]], folder: Path, core: int, n_rounds: int
) -> tuple[float, float, int]:
    endpoint, path = f"ipc://{folder}/d.sock", folder / "store.db"
    daemon = start("--serve", endpoint, str(path), core=core)
    wait_for(endpoint)
    load = Load(context, endpoint)
    load.n_unread = [1] * N_JOBS  # for the greeting on connecting
    load.answer()
    load.keep_alive()
    time.sleep(1.5)
    expected = n_rounds * N_JOBS * RECORDS_PER_MESSAGE
    start_s, start_cpu_s = time.monotonic(), cpu_s(daemon)
    for index in range(n_rounds):
        load.round()
        load.answer(ROUNDS_IN_FLIGHT)
        if index % 64 == 0:
            load.keep_alive()
    while (found := n_stored(path)) < expected:
        time.sleep(0.01)
        if time.monotonic() - start_s > 120:
            raise SystemExit(f"only {found} of {expected} measurements were stored")
    elapsed_s = time.monotonic() - start_s
    used_cpu_s = cpu_s(daemon) - start_cpu_s
    status = fetch_status(endpoint)
    if not status or any(job.health != "ok" for job in status.jobs):
        raise SystemExit(f"the daemon is not well: {status}")
    finish(daemon, load)
    return expected * N_RANKS / elapsed_s, expected * N_RANKS / used_cpu_s, status.resident_bytes


def latency(
    context: zmq.Context[zmq.Socket[bytes]], folder: Path, core: int, duration_s: float, load_per_s: float
) -> tuple[list[float], list[float], float]:
    """Latency of a plan under load, duration of thoughts about 1,000 keys, and the load."""
    endpoint, path = f"ipc://{folder}/d.sock", folder / "store.db"
    daemon = start("--serve", endpoint, str(path), core=core)
    wait_for(endpoint)
    load, thinker = Load(context, endpoint), Thinker(context, endpoint)
    stop = threading.Event()
    sent = [0, 0.0]

    def send() -> None:
        os.nice(5)  # of this thread: the probe must wait for the daemon, not for this core
        load.n_unread = [1] * N_JOBS
        start_s, n_rounds, n_thoughts = time.monotonic(), 0, 0
        while not stop.is_set():
            n_rounds += 1
            if time.monotonic() - start_s >= n_thoughts * THINKING_EVERY_S:
                n_thoughts += 1
                sent[0] += thinker.step()
            due_s = start_s + (sent[0] + N_JOBS * N_RANKS * RECORDS_PER_MESSAGE) / load_per_s
            sent[0] += load.round(max(0.0, due_s - time.monotonic()))
            load.answer(limit=64)
            if n_rounds % 64 == 0:
                load.keep_alive()
            sent[1] = time.monotonic() - start_s

    thread = threading.Thread(target=send)
    thread.start()
    waits_ms = subprocess.run(
        [sys.executable, "-m", "benchmarks.service.daemon_load", "--probe", endpoint, str(duration_s)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    stop.set()
    thread.join()
    status = fetch_status(endpoint)
    if not status or any(job.health != "ok" for job in status.jobs):
        raise SystemExit(f"the daemon is not well: {status}")
    thought_ms = finish(daemon, load, *thinker.sockets)
    return [float(wait) for wait in waits_ms], thought_ms, sent[0] / sent[1]


def probe(endpoint: str, duration_s: float) -> int:
    """Rank 0 of one more job, in a process of its own: prints one latency (ms) per step."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart(wire.encode(wire.Hello("probe", 0, 1, 0, "node", os.getpid(), "probe", {}, 0, 5)))
    time.sleep(1.0)
    end_s, step, waits_ms = time.monotonic() + duration_s, 0, []
    while time.monotonic() < end_s:
        step += 1
        start_s = time.perf_counter()
        socket.send_multipart(wire.encode(wire.Steps("probe", 0, (StepRecord(step, 0, 1.0),))))
        while True:
            message = wire.decode_daemon(socket.recv_multipart())
            if isinstance(message, wire.PlanOffer) and message.plan.epoch == step:
                break
        waits_ms.append((time.perf_counter() - start_s) * 1000)
        if step % 50 == 0:
            socket.send_multipart(wire.encode(wire.Hello("probe", 0, 1, 0, "node", os.getpid(), "probe", {}, 0, 5)))
        time.sleep(PROBE_EVERY_S)
    print("\n".join(map(str, waits_ms)))
    return 0


def finish(process: subprocess.Popen[bytes], load: Load, *others: zmq.Socket[bytes]) -> list[float]:
    """End a daemon; returns the duration of each of its thoughts (ms)."""
    process.terminate()
    printed, _ = process.communicate()
    for sockets in (others, *load.sockets):
        for socket in sockets:
            socket.close(0)
    return [float(word) for word in printed.split()]


def main() -> int:
    parser = options_of(__doc__, quick="ends within 60 s")
    for mode, n_arguments in (("--serve", 2), ("--probe", 2)):
        parser.add_argument(mode, nargs=n_arguments, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(*arguments.serve)
    if arguments.probe:
        return probe(arguments.probe[0], float(arguments.probe[1]))
    cores = sorted(os.sched_getaffinity(0))
    core = cores[-1]
    if len(cores) > 1:
        os.sched_setaffinity(0, set(cores[:-1]))  # the senders keep off the daemon's core
    n_runs, n_rounds, duration_s = (2, 120, 6.0) if arguments.quick else (5, 300, 20.0)
    ours, per_cpu, resident, waits_ms, thought_ms, shares = [], [], [], [], [], []
    with zmq.Context() as context:
        for run in range(n_runs):
            with tempfile.TemporaryDirectory() as name:
                per_s, per_cpu_s, resident_bytes = throughput(context, Path(name), core, n_rounds)
                ours.append(per_s)
                per_cpu.append(per_cpu_s)
                resident.append(resident_bytes)
            with tempfile.TemporaryDirectory() as name:
                waits, thought, sent_per_s = latency(context, Path(name), core, duration_s, LOAD_SHARE * per_s)
                waits_ms.append(float(np.percentile(waits, 99)))
                thought_ms.append(float(np.percentile(thought, 99)))
                shares.append(sent_per_s / per_s)
            print(
                f"run {run + 1} of {n_runs}: {ours[-1]:,.0f} stored/s ({per_cpu[-1]:,.0f} per CPU s),"
                f" plan p99 {waits_ms[-1]:.2f} ms and thinking p99 {thought_ms[-1]:.2f} ms at {shares[-1]:.2f} of that",
                file=sys.stderr,
            )
    report(
        "daemon_load",
        [
            Result("observations_per_s", median(ours), "1/s", ">= 150000"),
            Result("observations_per_cpu_s", median(per_cpu), "1/s of CPU", ">= 150000"),
            Result("plan_latency_p99_ms", median(waits_ms), "ms", "<= 5"),
            Result("thinking_p99_ms", median(thought_ms), "ms", "<= 5"),
            Result("load_share_during_latency", median(shares), "", f">= {0.95 * LOAD_SHARE}"),
            Result("resident_mib_64_ranks", max(resident) / 2**20, "MiB", "<= 300"),
        ],
        as_json=arguments.json,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
