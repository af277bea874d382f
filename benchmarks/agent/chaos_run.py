"""One run of chaos: jobs, their daemons, and the events."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil
import zmq

from benchmarks.agent.chaos_node import HANG_S, ZEROTUNE, Job, Node, wait_for
from benchmarks.lib.faults.bad_line_worker import HARMS, PASS
from benchmarks.lib.faults.shifted_clock import ShiftedClock
from benchmarks.lib.faults.two_namespaces import LEADER, LINK, Namespace
from benchmarks.lib.reporting import say

RANKS: Final = 2
"""Of each job."""
LEAST_S: Final = 13.0
"""Of chaos, however late it began."""
RANK_LIVES_S: Final = 45.0
"""Between two deaths of ranks, so that a job trains between its restarts."""
REFERENCE_S: Final = 120.0
"""Jobs without the agent are watched for so long at least, or for as long as those with it."""
PAUSE_S: Final = (0.2, 1.0)
"""Between two events."""
PLAN_WITHIN_S: Final = 15.0
"""After the jobs' first steps, chaos waits so long for a plan in force."""
RECORDS_WITHIN_S: Final = 10.0
"""After a daemon's start."""
DIES_YOUNG: Final = 0.6
"""Chance that a daemon which follows a killed one is killed, too, within YOUNG_S."""
YOUNG_S: Final = 0.6
"""A daemon's start takes most of it on a quiet machine."""
DAY_S: Final = 86_400.0
CLOCK_JUMPS_S: Final = (DAY_S, 3652.5 * DAY_S)
"""Off the machine's clock, ahead or back; log-uniform between the ends."""
MARK: Final = "ZEROTUNE_CHAOS"
"""An environment variable of every process of one run."""


class Chaos:
    def __init__(self, folder: Path, arguments: argparse.Namespace, networks: Sequence[Namespace] = ()) -> None:
        self.folder, self.arguments = folder, arguments
        self.chance = random.Random(arguments.seed)
        self.events: Counter[str] = Counter()
        self.n_hangs = 0
        self.is_over = threading.Event()
        (folder / "clock").mkdir()
        self.clock = ShiftedClock(folder / "clock")
        """Of all ranks."""
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: str(folder)}
        self.environment["PYTHONDONTWRITEBYTECODE"] = "1"  # else a full disk leaves compiled modules cut short
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo may meet dead ranks, pytorch#135712
        self.line: subprocess.Popen[str] | None = None
        self.nodes = [Node(folder / "n", self.environment)] if not networks else self._two_nodes(networks)
        n_ranks = RANKS // len(self.nodes)
        self.jobs = [
            Job(one, folder, self.nodes, n_ranks, self.clock.environment, with_agent=arguments.with_agent)
            for one in arguments.jobs
        ]

    def _two_nodes(self, networks: Sequence[Namespace]) -> list[Node]:
        """Nodes whose daemons talk over a `BadLine`."""
        keys = self.folder / "keys"
        subprocess.run([*ZEROTUNE, "daemon", "keys", str(keys)], check=True, capture_output=True)
        self.environment |= {"GLOO_SOCKET_IFNAME": LINK, "ZEROTUNE_CURVE_KEYS": str(keys)}
        first, second = networks
        place = f"{LEADER}:5577"
        line = [*second.prefix, sys.executable, "-m", "benchmarks.lib.faults.bad_line_worker", place, str(first.path)]
        self.line = subprocess.Popen(line, stdin=subprocess.PIPE, text=True, env=self.environment)
        options = ("--curve-keys", str(keys), "--listen")
        return [
            Node(
                self.folder / name, self.environment, prefix=network.prefix, address=network.address,
                options=(*options, f"tcp://{place if network is first else network.address + ':5577'}"),
            )
            for name, network in (("a", first), ("b", second))
        ]  # fmt: skip


    @property
    def node(self) -> Node:
        return self.chance.choice(self.nodes)

    @property
    def records_within_s(self) -> float:
        return RECORDS_WITHIN_S if self.arguments.with_agent and not self.arguments.quick else 1.0

    def _kill_daemon(self, node: Node) -> None:
        """Kill at once every other time, else after the daemon has written measurements."""
        waits_s = 0.0
        if self.chance.random() < 0.5:
            waits_s = self.records_within_s
        node.kill_daemon(waits_s)

    def kill_daemon(self) -> None:
        """Kill a daemon and some of its successors while they start; then start another one."""
        node = self.node
        self._kill_daemon(node)
        while self.chance.random() < DIES_YOUNG:
            node.start_daemon()
            time.sleep(self.chance.uniform(0.0, YOUNG_S))
            node.kill_daemon(0.0)
        time.sleep(self.chance.choice((0.0, 0.0, 0.0, 1.5)))
        node.start_daemon()

    def stop_daemon(self) -> None:
        daemon = self.node.daemon
        daemon.send_signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.1, 3.0))
        daemon.send_signal(signal.SIGCONT)

    def send_garbage(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 100
            socket.connect(self.node.endpoint)
            for _ in range(50):
                frames = [self.chance.randbytes(self.chance.choice((0, 3, 100, 10_000))) for _ in range(3)]
                socket.send_multipart(frames[: self.chance.randint(1, 3)], zmq.DONTWAIT)

    def imitate_daemon(self) -> None:
        """Kill a daemon and answer in its place with invalid messages."""
        node = self.node
        self._kill_daemon(node)
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(node.endpoint)
            node.socket.chmod(0o600)
            until_s = time.monotonic() + 1.0
            while time.monotonic() < until_s:
                if socket.poll(100):
                    sender = socket.recv_multipart()[0]
                    with contextlib.suppress(zmq.ZMQError):
                        socket.send_multipart([sender, self.chance.randbytes(self.chance.choice((1, 50, 5_000)))])
        node.start_daemon()

    def fill_disk(self) -> None:
        """For a while no file of a daemon may grow."""
        pid = self.node.daemon.pid
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            time.sleep(self.chance.uniform(0.5, 2.0))
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def jump_clock(self) -> None:
        """Shift the calendar of a daemon or of all ranks until the next jump."""
        shortest, longest = map(math.log, CLOCK_JUMPS_S)
        ahead_s = self.chance.choice((-1, 1)) * math.exp(self.chance.uniform(shortest, longest))
        self.chance.choice((self.clock, self.node.clock)).shift(wall_s=ahead_s)

    def harm_line(self) -> None:
        """Delay, cut or drop the traffic between the nodes' daemons."""
        self._tell_line(self.chance.choice(HARMS))
        time.sleep(self.chance.uniform(0.5, 6.0))
        self._tell_line(PASS)

    def _tell_line(self, word: str) -> None:
        if self.line is not None and self.line.stdin is not None:
            self.line.stdin.write(f"{word}\n")
            self.line.stdin.flush()

    def kill_rank(self) -> None:
        ranks = self.chance.choice(self.jobs).ranks()
        if ranks:
            with contextlib.suppress(psutil.Error):
                self.chance.choice(ranks).kill()


    @property
    def n_deaths(self) -> int:
        return sum(node.n_deaths for node in self.nodes)

    def run(
        self, seconds: float, n_deaths: float = math.inf, n_steps: float = math.inf, by_s: float = math.inf
    ) -> None:
        common = [name for name in self.arguments.events if name != "kill_rank"]
        to_come: list[str] = []
        wait_for(lambda: self.is_over.is_set() or all(job.steps() for job in self.jobs), 120.0)
        if self.arguments.with_agent:  # events in a job without a plan prove nothing
            has_plan = functools.partial(self.nodes[0].n_steps, under_a_plan=True)
            wait_for(lambda: self.is_over.is_set() or bool(has_plan()), PLAN_WITHIN_S)
        until_s, next_rank_s = time.monotonic() + seconds, time.monotonic() + 0.2 * RANK_LIVES_S
        until_s = max(min(until_s, by_s), time.monotonic() + min(seconds, LEAST_S))
        enough_s, told_at_s = time.monotonic() + REFERENCE_S, 0.0
        while time.monotonic() < until_s and not self.n_hangs and all(job.runs for job in self.jobs):
            if self.n_deaths >= n_deaths or self.is_over.is_set():
                break
            if not to_come:  # each kind once, in an order drawn by chance, before any comes again
                to_come = self.chance.sample(common, len(common))
            event = getattr(self, to_come.pop())
            is_long_enough = n_steps < math.inf and time.monotonic() > enough_s  # a death of a rank would end steps
            if "kill_rank" in self.arguments.events and time.monotonic() > next_rank_s and not is_long_enough:
                event, next_rank_s = self.kill_rank, time.monotonic() + RANK_LIVES_S
            event()
            self.events[event.__name__] += 1
            time.sleep(self.chance.uniform(*PAUSE_S))
            self.n_hangs += sum(job.hangs() for job in self.jobs)
            if time.monotonic() - told_at_s > 10.0:
                told_at_s = time.monotonic()
                left_s = until_s - time.monotonic()
                say(f"{self.events.total()} events, {self.n_deaths} deaths of daemons, {left_s:.0f} s to go at most")
                if time.monotonic() > enough_s and min(job.n_steps_at_most() for job in self.jobs) >= n_steps:
                    break
        for job in self.jobs:
            job.stop()
        wait_for(lambda: self.is_over.is_set() or all(job.has_ended for job in self.jobs), 2 * HANG_S)
        if self.is_over.is_set():
            return
        self.n_hangs += sum(not job.has_ended for job in self.jobs) if not self.n_hangs else 0
        time.sleep(1.0)  # the last records are on their way
        for node in self.nodes:
            node.end_daemon()

    def close(self) -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    process.kill()
        for one in (*(node.daemon for node in self.nodes), *(one for job in self.jobs for one in job.processes)):
            one.wait()
        if self.line is not None:
            self.line.wait()
