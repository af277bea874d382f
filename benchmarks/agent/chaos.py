"""Training while all around it breaks: daemons killed, stopped, imitated; garbage, full disks, odd clocks, dead ranks.

    python -m benchmarks chaos [--minutes M] [--quick] [--ranks N] [--nodes 2 | --daemons N] [--jobs J ...]
        [--events E ...] [--deaths N] [--seed S] [--afresh] [--json]

Two jobs, one under FSDP2 and one under our runtime, train on the emulated NCCL with one daemon for both, under
torchrun. All along an event drawn by chance befalls the daemon, its store's disk, a clock or a rank. Then the same
befalls the same two jobs without the agent, for as long or until they came as far: what steps stall by there is the
machine's own doing. Each five minutes of it are a round, kept in build/chaos.jsonl until the last: a run that was
interrupted goes on with the next (--afresh starts over). Figures:

    events, daemon_deaths     injected
    ..._while_recording       of daemons that had written measurements
    hangs                     jobs of which no step came for HANG_S, although nothing held them up
    disagreements             collectives for which ranks chose differently; the emulated NCCL checks each
    failed_jobs               that ended by themselves, or in another way than with code 0
    losses_that_differ        of those compared, to the last bit, from those without the agent
    acknowledged_rows_lost    measurements that were in the store when a daemon died, and are not at the end
    worst_stall_ms            the longest that the agent's code held a training thread at once, in a hook or at a
                              boundary, whatever it waited for there, a processor too: on a busy machine, most of it
    worst_step_ms             beside the worst without the agent; `..._beyond_twin_ms` by how much it took longer

Run it with a priority above what else runs (`nice -n -15`, as root), or on a machine that nothing else uses.

With `--nodes 2` each job spans two network namespaces, each with a daemon, and what daemons say to each other passes
through a line that delays, holds, loses, halves and drops it: lib/faults/bad_line_worker.py, a process of ours,
since not every kernel has `tc netem`.

`--quick` ends within a minute: if not told otherwise, only our runtime trains and no rank dies; the jobs without the
agent run at the same time.

`--events` and `--jobs` choose among them. Calendars jump by a day to ten years, ahead or back: the daemon's or that of
all ranks, never the machine's own (benchmarks/lib/faults/shifted_clock.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psutil
import zmq

from benchmarks.agent.chaos_node import HANG_S, ZEROTUNE, Job, Node, wait_for
from benchmarks.agent.chaos_rounds import Rounds, together
from benchmarks.lib.argument_types import positive
from benchmarks.lib.faults.bad_line_worker import HARMS, PASS
from benchmarks.lib.faults.shifted_clock import ShiftedClock
from benchmarks.lib.faults.two_namespaces import LEADER, LINK, Namespace, two_namespaces
from benchmarks.lib.reporting import Result, report, say
from benchmarks.recording.record import commit_now
from zerotune.store.errors import UserError

RUNTIMES: Final = ("fsdp2", "zero_runtime")
EVENTS: Final = (
    "kill_daemon", "stop_daemon", "send_garbage", "imitate_daemon", "fill_disk", "jump_clock", "kill_rank", "harm_line",
)  # fmt: skip
QUICK_JOBS: Final = ("zero_runtime",)
QUICK_EVENTS: Final = tuple(name for name in EVENTS if name != "kill_rank")
"""To begin a job again takes torch too long."""
QUICK_S: Final = 30.0
"""Of chaos, at most."""
QUICK_ENDS_S: Final = 30.0
"""Chaos ends so long after the run began: what it left takes ten seconds to end."""
LEAST_S: Final = 13.0
"""Of chaos, however late it began."""
ROUND_S: Final = 300.0
"""Of a long run, which goes on with the next round after an interrupt."""
RANK_LIVES_S: Final = 45.0
"""From one death of a rank to the next, so that a job trains between its restarts."""
REFERENCE_S: Final = 120.0
"""What happens without the agent is watched for so long at least, or for as long as with it."""
PAUSE_S: Final = (0.2, 1.0)
"""Between two events."""
RECORDS_WITHIN_S: Final = 10.0
"""Of a daemon's start."""
DIES_YOUNG: Final = 0.6
"""Chance that a daemon which follows a killed one is killed, too, within YOUNG_S."""
YOUNG_S: Final = 0.6
"""A daemon's start takes most of it on a quiet machine."""
DAY_S: Final = 86_400.0
CLOCK_JUMPS_S: Final = (DAY_S, 3652.5 * DAY_S)
"""From the machine's clock, ahead or back; both ends are as likely as what lies between."""
WARM_UP_STEPS: Final = 5
MARK: Final = "ZEROTUNE_CHAOS"
"""In the environment of every process that belongs to one run."""


class Chaos:
    """One run: the jobs, the daemons, and what befalls them."""

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
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo may meet dead ranks, pytorch#135712
        self.line: subprocess.Popen[str] | None = None
        self.nodes = [Node(folder / "n", self.environment)] if not networks else self._two_nodes(networks)
        n_ranks = max(1, arguments.ranks // len(self.nodes))
        self.jobs = [
            Job(one, folder, self.nodes, n_ranks, self.clock.environment, with_agent=arguments.with_agent)
            for one in arguments.jobs
        ]

    def _two_nodes(self, networks: Sequence[Namespace]) -> list[Node]:
        """Nodes whose daemons speak over a line of ours."""
        keys = self.folder / "keys"
        subprocess.run([*ZEROTUNE, "keys", str(keys)], check=True, capture_output=True)
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

    # ---- events -------------------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """Any of them."""
        return self.chance.choice(self.nodes)

    @property
    def records_within_s(self) -> float:
        """How long a daemon's death waits for what it writes."""
        return RECORDS_WITHIN_S if self.arguments.with_agent and not self.arguments.quick else 1.0

    def _kill_daemon(self, node: Node) -> None:
        """Every other time however young it is, else once it has written what it measured."""
        waits_s = 0.0
        if self.chance.random() < 0.5:
            waits_s = self.records_within_s
        node.kill_daemon(waits_s)

    def kill_daemon(self) -> None:
        """A daemon dies, and some that follow it while they begin; after a while there is another."""
        node = self.node
        self._kill_daemon(node)
        while self.chance.random() < DIES_YOUNG:
            node.start_daemon()
            time.sleep(self.chance.uniform(0.0, YOUNG_S))
            node.kill_daemon(0.0)
        time.sleep(self.chance.choice((0.0, 0.0, 0.0, 1.5)))
        node.start_daemon()

    def stop_daemon(self) -> None:
        """A daemon stands still."""
        daemon = self.node.daemon
        daemon.send_signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.1, 3.0))
        daemon.send_signal(signal.SIGCONT)

    def send_garbage(self) -> None:
        """A daemon hears what makes no sense."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 100
            socket.connect(self.node.endpoint)
            for _ in range(50):
                frames = [self.chance.randbytes(self.chance.choice((0, 3, 100, 10_000))) for _ in range(3)]
                socket.send_multipart(frames[: self.chance.randint(1, 3)], zmq.DONTWAIT)

    def imitate_daemon(self) -> None:
        """A daemon dies, and something answers in its place that makes no sense."""
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
        """For a while no file of a daemon's may grow."""
        pid = self.node.daemon.pid
        with contextlib.suppress(OSError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            time.sleep(self.chance.uniform(0.5, 2.0))
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def jump_clock(self) -> None:
        """The calendar of a daemon or of all ranks is another, until the next jump."""
        shortest, longest = map(math.log, CLOCK_JUMPS_S)
        ahead_s = self.chance.choice((-1, 1)) * math.exp(self.chance.uniform(shortest, longest))
        self.chance.choice((self.clock, self.node.clock)).shift(wall_s=ahead_s)

    def harm_line(self) -> None:
        """What nodes' daemons say to each other comes late, in part, or not at all."""
        self._tell_line(self.chance.choice(HARMS))
        time.sleep(self.chance.uniform(0.5, 6.0))
        self._tell_line(PASS)

    def _tell_line(self, word: str) -> None:
        if self.line is not None and self.line.stdin is not None:
            self.line.stdin.write(f"{word}\n")
            self.line.stdin.flush()

    def kill_rank(self) -> None:
        """A rank dies; torchrun starts its job again."""
        ranks = self.chance.choice(self.jobs).ranks()
        if ranks:
            with contextlib.suppress(psutil.Error):
                self.chance.choice(ranks).kill()

    # ---- the run ------------------------------------------------------------------------------------

    @property
    def n_deaths(self) -> int:
        """Daemons that were killed."""
        return sum(node.n_deaths for node in self.nodes)

    def run(
        self, seconds: float, n_deaths: float = math.inf, n_steps: float = math.inf, by_s: float = math.inf
    ) -> None:
        """Let things happen, then end the jobs in order.

        Args:
            seconds: how long at most.
            n_deaths: enough daemons that were killed.
            n_steps: enough of them in one start of each job, from REFERENCE_S on.
            by_s: when to end, after LEAST_S at least, by the monotonic clock.
        """
        common = [getattr(self, name) for name in self.arguments.events if name != "kill_rank"]
        wait_for(lambda: self.is_over.is_set() or all(job.steps() for job in self.jobs), 120.0)
        until_s, next_rank_s = time.monotonic() + seconds, time.monotonic() + 0.2 * RANK_LIVES_S
        until_s = max(min(until_s, by_s), time.monotonic() + min(seconds, LEAST_S))
        enough_s, told_at_s = time.monotonic() + REFERENCE_S, 0.0
        while time.monotonic() < until_s and not self.n_hangs and all(job.runs for job in self.jobs):
            if self.n_deaths >= n_deaths or self.is_over.is_set():
                break
            event = self.chance.choice(common)
            is_long_enough = n_steps < math.inf and time.monotonic() > enough_s  # but for steps, which a death ends
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
        """Leave no process behind."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder):
                    process.kill()
        for one in (*(node.daemon for node in self.nodes), *(one for job in self.jobs for one in job.processes)):
            one.wait()
        if self.line is not None:
            self.line.wait()


@contextlib.contextmanager
def runs(folder: Path, arguments: argparse.Namespace, *, with_agent: bool) -> Iterator[list[Chaos]]:
    """All daemons at once, each with its jobs; nothing of them is left afterwards.

    Args:
        folder: of their own, which is made.
        arguments: of the command line.
        with_agent: whether the jobs are tuned.

    Yields:
        The runs, whose jobs have begun.

    Raises:
        UserError: two nodes cannot be had.
    """
    folder.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        networks = stack.enter_context(two_namespaces()) if arguments.nodes == 2 else ()
        begun = []
        for number in range(arguments.daemons):
            own = folder / str(number)
            own.mkdir(mode=0o700)
            seeded = {**vars(arguments), "seed": arguments.seed + number, "with_agent": with_agent}
            begun.append(Chaos(own, argparse.Namespace(**seeded), networks))
            stack.callback(begun[-1].close)
        yield begun


def at_once(
    begun: Sequence[Chaos],
    seconds: float,
    n_deaths: float = math.inf,
    n_steps: float = math.inf,
    by_s: float = math.inf,
) -> None:
    """Let all of them run, each in a thread.

    Args:
        begun: the runs.
        seconds: how long each lasts at most.
        n_deaths: enough daemons that were killed, in all of them.
        n_steps: enough of them in one start of each job, from REFERENCE_S on.
        by_s: when to end, after LEAST_S at least, by the monotonic clock.
    """
    with ThreadPoolExecutor(len(begun)) as pool:
        try:
            list(pool.map(lambda chaos: chaos.run(seconds, n_deaths / len(begun), n_steps, by_s), begun))
        except BaseException:
            for chaos in begun:
                chaos.is_over.set()
            raise


def worst_ms(begun: Sequence[Chaos], name: str) -> float:
    """The longest time of a step on any rank.

    Args:
        begun: the runs.
        name: which, of a line of the worker's log.

    Returns:
        In ms; the first steps of each start, which compile and connect, are none.
    """
    starts = [lines for chaos in begun for job in chaos.jobs for lines in job.steps("*").values()]
    return max((one[name] for lines in starts for one in lines[WARM_UP_STEPS:]), default=0.0)


def losses(begun: Sequence[Chaos], reference: Sequence[Chaos]) -> list[tuple[object, object]]:
    """Of each step its loss, and what it is without the agent; as far as both came.

    Args:
        begun: the runs with the agent.
        reference: those without.

    Returns:
        Pairs of losses as the workers wrote them.
    """
    found = []
    for runtime in {job.runtime for chaos in begun for job in chaos.jobs}:
        tuned, untuned = (
            [lines for chaos in some for job in chaos.jobs if job.runtime == runtime for lines in job.steps().values()]
            for some in (begun, reference)
        )
        expected = max(untuned, key=len, default=[])
        for lines in tuned:
            found += [(one["loss"], there["loss"]) for one, there in zip(lines, expected, strict=False)]
    return found


def play(arguments: argparse.Namespace, seconds: float, n_deaths: float) -> dict[str, float]:
    """One round, with the agent and without.

    Args:
        arguments: of the command line.
        seconds: of chaos in each.
        n_deaths: enough daemons that were killed.

    Returns:
        Figures, for `together`.

    Raises:
        UserError: two nodes cannot be had.
    """
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)))
        tuned = stack.enter_context(runs(folder / "tuned", arguments, with_agent=True))
        nodes = [node for chaos in tuned for node in chaos.nodes]
        jobs = [job for chaos in tuned for job in chaos.jobs]
        if arguments.quick:  # both beside each other, at once
            untuned = stack.enter_context(runs(folder / "untuned", arguments, with_agent=False))
            at_once([*tuned, *untuned], seconds, by_s=began_s + QUICK_ENDS_S)
        else:
            at_once(tuned, seconds, n_deaths)
            untuned = stack.enter_context(runs(folder / "untuned", arguments, with_agent=False))
            at_once(untuned, seconds, n_steps=max(job.n_steps_at_most() for job in jobs))
        rows = [node.rows() for node in nodes]
        compared = losses(tuned, untuned)
        logs = "".join(job.log.read_text(errors="replace") for job in jobs)
        events = sum((chaos.events for chaos in tuned), Counter[str]())
        return {
            **{f"events@{name}": n for name, n in events.items()},
            "seconds": seconds,
            "events": events.total(),
            "daemon_deaths": sum(chaos.n_deaths for chaos in tuned),
            "daemon_deaths_while_recording": sum(node.n_deaths_while_recording for node in nodes),
            "steps": sum(len(lines) for job in jobs for lines in job.steps().values()),
            "steps_under_a_plan": sum(one.n_steps_under_a_plan() for one in nodes),
            "hangs": sum(chaos.n_hangs for chaos in tuned),
            "disagreements": logs.count("RankDisagreement"),
            "failed_jobs": sum(job.has_failed for job in jobs),
            "losses_compared": len(compared),
            "losses_that_differ": sum(one != there for one, there in compared),
            "rows": sum(map(len, rows)),
            "acknowledged_rows_lost": sum(
                len(node.acknowledged - kept) for node, kept in zip(nodes, rows, strict=True)
            ),
            "worst_step_ms": worst_ms(tuned, "wall"),
            "worst_untuned_step_ms": worst_ms(untuned, "wall"),
            "worst_stall_ms": worst_ms(tuned, "ours"),
        }


def results(figures: dict[str, float]) -> list[Result]:
    """The table.

    Args:
        figures: of all rounds.

    Returns:
        In the table's order.
    """
    worst, twin = figures["worst_step_ms"], figures["worst_untuned_step_ms"]
    return [
        *(Result(name, figures[name], "events") for name in sorted(figures) if name.startswith("events@")),
        Result("events", figures["events"], "events", "> 0"),
        Result("daemon_deaths", figures["daemon_deaths"], "deaths", "> 0"),
        Result("daemon_deaths_while_recording", figures["daemon_deaths_while_recording"], "deaths", "> 0"),
        Result("steps", figures["steps"], "steps", "> 0"),
        Result("steps_under_a_plan", figures["steps_under_a_plan"], "steps in the store", "> 0"),
        Result("hangs", figures["hangs"], "jobs", "0"),
        Result("disagreements", figures["disagreements"], "lines", "0"),
        Result("failed_jobs", figures["failed_jobs"], "jobs", "0"),
        Result("losses_compared", figures["losses_compared"], "steps", "> 0"),
        Result("losses_that_differ", figures["losses_that_differ"], "steps", "0"),
        Result("rows", figures["rows"], "rows", "> 0"),
        Result("acknowledged_rows_lost", figures["acknowledged_rows_lost"], "rows", "0"),
        Result("worst_step_ms", worst, "ms", peer="untuned", ratio=worst / twin if twin else None),
        Result("worst_step_beyond_twin_ms", max(0.0, worst - twin), "ms"),
        Result("worst_stall_ms", figures["worst_stall_ms"], "ms", "<= 50"),
    ]


def go_on(arguments: argparse.Namespace, rounds: Rounds) -> dict[str, float]:
    """Rounds, until there were minutes or deaths enough.

    Args:
        arguments: of the command line.
        rounds: those that have ended; is added to.

    Returns:
        Figures of all.

    Raises:
        UserError: two nodes cannot be had.
    """
    while True:
        done = together(rounds.figures)
        left_s = 60.0 * arguments.minutes - done.get("seconds", 0.0)
        n_left = arguments.deaths - done.get("daemon_deaths", 0)
        if done and (left_s <= 0.0 or n_left <= 0 or done["hangs"] or arguments.quick):
            return done
        n_rounds = max(1, math.ceil(left_s / ROUND_S))
        if not arguments.quick:
            say(f"{len(rounds.figures)} rounds have ended, {n_rounds} are left at most")
        seeded = {**vars(arguments), "seed": arguments.seed + 1000 * len(rounds.figures)}
        rounds.add(play(argparse.Namespace(**seeded), QUICK_S if arguments.quick else left_s / n_rounds, n_left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of chaos, with the agent")
    parser.add_argument("--quick", action="store_true", help="as much as fits into a minute")
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="of each job")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="that each job spans; 2 needs root")
    parser.add_argument("--daemons", type=positive, default=1, metavar="N", help="at once, each with all jobs")
    parser.add_argument("--jobs", nargs="+", choices=RUNTIMES, metavar="JOB", help=", ".join(RUNTIMES))
    parser.add_argument("--events", nargs="+", choices=EVENTS, metavar="EVENT", help=", ".join(EVENTS))
    parser.add_argument("--deaths", type=positive, default=math.inf, metavar="N", help="end once so many daemons died")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--afresh", action="store_true", help="forget the rounds of a run that was interrupted")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    arguments.jobs = arguments.jobs or (QUICK_JOBS if arguments.quick else RUNTIMES)
    arguments.events = arguments.events or (QUICK_EVENTS if arguments.quick else EVENTS)
    if arguments.nodes == 1:
        arguments.events = [name for name in arguments.events if name != "harm_line"]
    elif arguments.daemons > 1:
        parser.error(f"--daemons {arguments.daemons}: with --nodes 2 there are two already; leave it out")
    if not set(arguments.events) - {"kill_rank"}:
        parser.error(f"--events {' '.join(arguments.events)}: name another one of one node, or use --nodes 2")
    plan = {name: value for name, value in vars(arguments).items() if name not in ("json", "afresh")}
    rounds = Rounds(json.dumps([commit_now(), plan]))
    if arguments.afresh or arguments.quick:
        rounds.forget()
    try:
        figures = go_on(arguments, rounds)
    except UserError as error:
        parser.error(str(error))
    rounds.forget()
    report("chaos", results(figures), as_json=arguments.json)


if __name__ == "__main__":
    main()
