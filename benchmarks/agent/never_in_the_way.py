"""Job shapes of public reports, each with zerotune and without: whether they end alike, and are tuned.

python -m benchmarks never_in_the_way [--quick] [--shapes S ...] [--faults F ...] [--json]

Each shape (benchmarks/agent/job_shapes) runs on the emulated NCCL without the agent, with it, and with each fault.
A shape hangs if no rank logs a loss for HANG_S. It is silent if no last line tells its tuning. A figure `_with_FAULT`
counts only effects that the same fault does not have on a job without the agent.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from benchmarks.agent.job_shapes import (  # noqa: F401 - registers the shapes
    background,
    data_parallel,
    model_parallel,
    optimizers,
    sharded,
    unequal_steps,
    worlds,
)
from benchmarks.agent.job_shapes.agent_counters import FAILING, FAULT, PAUSE_S, PAUSED, PROMISED
from benchmarks.agent.job_shapes.job import SHAPES, Shape
from benchmarks.agent.job_shapes.running import Event, Outcome, run
from benchmarks.lib.reporting import Result, options_of, report, say
from zerotune.agent import launch
from zerotune.agent.nccl.compiled import EMULATED_NCCL, PLUGIN
from zerotune.tuner.client.background_daemon import start_in_background

FABRIC: Final = "ethernet_boxes"
OUTPUT_SHOWN: Final = 4000
"""Characters of the ranks' output that are shown if a job hangs or ends otherwise."""
QUICK: Final = (
    "join_uneven", "gan_by_rank", "metrics_around_backward", "autograd_grad", "megatron", "metrics_in_a_thread",
)  # fmt: skip
IDLE_S: Final = 600.0
"""Longer than consecutive runs without the agent take."""
LINE: Final = re.compile(r"^zerotune: (\d+ of \d+ collectives? tuned|nothing was tuned)", re.MULTILINE)
"""The last line of a launched job."""


class Daemon:
    """The daemon of all jobs; it is started again if a fault killed it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.endpoint = f"ipc://{folder}/d.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = start_in_background(self.endpoint, self._folder / "store.db", idle_exit_s=IDLE_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


@dataclass(frozen=True)
class Fault:
    """A fault of a job.

    `event` makes a new event for each run, or `environment` asks the agent for the fault. `befalls_all`: jobs without
    the agent have it, too.
    """

    event: Callable[[Daemon], Event] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    befalls_all: bool = False


def _kill(daemon: Daemon) -> Event:
    return Event(lambda _: daemon.kill())


def _stop(_: Daemon) -> Event:
    def send(number: int, pids: Sequence[int]) -> None:
        if pids:
            os.kill(pids[-1], number)

    return Event(functools.partial(send, signal.SIGSTOP), functools.partial(send, signal.SIGCONT), PAUSE_S)


FAULTS: Final = {
    "daemon_killed": Fault(_kill),
    "store_failing": Fault(environment={FAULT: FAILING}),
    "thread_paused": Fault(environment={FAULT: PAUSED}),
    "thread_paused_after_promise": Fault(environment={FAULT: PROMISED}),
    "rank_stopped": Fault(_stop, befalls_all=True),
}


class Runs:
    def __init__(self, folder: Path, daemon: Daemon) -> None:
        self._folder, self._daemon = folder, daemon
        self._n_runs = 0
        self.outcomes: list[Outcome] = []
        """Of all runs with the agent."""

    def untuned(self, shape: Shape, fault: Fault | None = None, plain: Outcome | None = None) -> Outcome:
        return self._run(shape, fault, plain, with_agent=False)

    def tuned(self, shape: Shape, plain: Outcome, fault: Fault | None = None) -> Outcome:
        self._daemon.start()
        outcome = self._run(shape, fault, plain, with_agent=True)
        self.outcomes.append(outcome)
        return outcome

    def _run(self, shape: Shape, fault: Fault | None, plain: Outcome | None, *, with_agent: bool) -> Outcome:
        self._n_runs += 1
        request = launch.LaunchRequest(
            [sys.executable], fabric=FABRIC, endpoint=self._daemon.endpoint, agent_on=with_agent, name=shape.name
        )
        environment = {**launch.environment(request), "ZEROTUNE_RUNTIME_DIR": str(self._folder)}
        event, half = None, 0
        if fault is not None:
            environment |= fault.environment
            event = fault.event(self._daemon) if fault.event is not None else None
        if plain is not None:
            half = sum(len(text) for name, text in plain.losses.items() if name.startswith("losses.0.")) // 2
        return run(shape, self._folder / str(self._n_runs), environment, half=half, event=event)


@dataclass
class Tally:
    """Names of shapes, by finding."""

    hang: list[str] = field(default_factory=list)
    otherwise: list[str] = field(default_factory=list)

    def add(self, name: str, outcome: Outcome, expected: Outcome) -> None:
        if outcome.hangs and not expected.hangs:
            self.hang.append(name)
        elif not outcome.hangs and not outcome.ends_as(expected):
            self.otherwise.append(name)
        else:
            return
        print(f"{name} ended with code {outcome.code}:\n{outcome.output[-OUTPUT_SHOWN:]}", file=sys.stderr, flush=True)


def play(names: Sequence[str], faults: Sequence[str], folder: Path) -> list[Result]:
    """Raises SystemExit if a shape does not end well without the agent."""
    daemon = Daemon(folder)
    runs = Runs(folder, daemon)
    plainly, with_fault = Tally(), {name: Tally() for name in faults}
    n_tuned, silent, undisturbed = 0, [], []
    try:
        for name in names:
            shape = SHAPES[name]
            plain = runs.untuned(shape)
            if plain.hangs or plain.code:
                raise SystemExit(f"{name} does not end well without the agent:\n{plain.output}")
            outcome = runs.tuned(shape, plain)
            plainly.add(name, outcome, plain)
            undisturbed.append(outcome)
            is_tuned = any(one["n_adopted"] for one in outcome.counters)
            n_tuned += is_tuned
            if not LINE.search(outcome.output):
                silent.append(name)
            words = [f"{name}: {plain.seconds:.1f} s, with the agent {outcome.seconds:.1f} s"]
            words += ["tuned" if is_tuned else "not tuned", *_found(name, plainly)]
            for fault_name in faults:
                fault = FAULTS[fault_name]
                expected = runs.untuned(shape, fault, plain) if fault.befalls_all else plain
                with_fault[fault_name].add(name, runs.tuned(shape, plain, fault), expected)
                words += [f"{word} with {fault_name}" for word in _found(name, with_fault[fault_name])]
            say(", ".join(words))
    finally:
        daemon.end()
    return [
        Result("job_shapes", len(names), "shapes", ">= 25" if len(names) == len(SHAPES) else ""),
        Result("job_shapes_that_hang", len(plainly.hang), "shapes", "0"),
        Result("job_shapes_that_end_otherwise", len(plainly.otherwise), "shapes", "0"),
        Result("job_shapes_tuned_share", n_tuned / len(names), "of them", ">= 0.8"),
        Result("job_shapes_silent", len(silent), "shapes", "0"),
        *agreement_figures(runs.outcomes, undisturbed),
        *(
            Result(f"job_shapes_that_{what}_with_{name}", len(found), "shapes", "0")
            for name, tally in with_fault.items()
            for what, found in (("hang", tally.hang), ("end_otherwise", tally.otherwise))
        ),
    ]


def _found(name: str, tally: Tally) -> list[str]:
    return ["HANGS"] * (name in tally.hang) + ["ENDS OTHERWISE"] * (name in tally.otherwise)


def agreement_figures(outcomes: Sequence[Outcome], undisturbed: Sequence[Outcome]) -> list[Result]:
    longest_us = max((one["longest_wait_us"] for outcome in outcomes for one in outcome.counters), default=0.0)
    ranks = [one for outcome in undisturbed for one in outcome.counters]
    if not ranks:
        return []
    n_changes = sum(one["n_changes"] for one in ranks)
    n_at_rest = sum(one["n_requests_at_rest"] for one in ranks)
    n_apart = sum(one["n_requests_at_start"] + one["n_requests_at_rest"] for one in ranks)
    per_change = (sum(one["n_store_requests"] for one in ranks) - n_apart) / max(1, n_changes)
    return [
        Result("longest_wait_ms", longest_us / 1e3, "ms"),
        Result("store_requests_per_change_and_rank", per_change, "requests", "<= 4"),
        Result("store_requests_in_steady_state", n_at_rest, "requests", "0"),
    ]


def main() -> None:
    parser = options_of(__doc__, quick="ends within a minute")
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), metavar="SHAPE", help=", ".join(sorted(SHAPES)))
    parser.add_argument("--faults", nargs="*", choices=sorted(FAULTS), metavar="FAULT", help=", ".join(FAULTS))
    arguments = parser.parse_args()
    names = arguments.shapes or (QUICK if arguments.quick else tuple(SHAPES))
    faults = arguments.faults if arguments.faults is not None else () if arguments.quick else tuple(FAULTS)
    PLUGIN.build()
    EMULATED_NCCL.build()
    torch.set_num_threads(1)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shapes-", ignore_cleanup_errors=True) as folder:
        results = play(names, faults, Path(folder))
    say(f"{time.monotonic() - began_s:.0f} s in all")
    report("never_in_the_way", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
