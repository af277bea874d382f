"""Training while all around it breaks: daemons killed, stopped, imitated; garbage, full disks, odd clocks, dead ranks.

python -m benchmarks chaos [--minutes M] [--quick] [--nodes 2] [--jobs J ...] [--events E ...] [--deaths N]
                           [--seed S] [--json]

An FSDP2 job and a job of our runtime train on the emulated NCCL while random events happen. The same events then happen
to jobs without the agent, the `twin`. Run it at a high priority (`nice -n -15`, as root) or on an idle machine.
`worst_stall_ms` is the longest time in a hook or boundary of the agent. `worst_wait_ms` is a call's wait for a change.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks.agent.chaos_run import Chaos
from benchmarks.lib.argument_types import positive
from benchmarks.lib.faults.two_namespaces import two_namespaces
from benchmarks.lib.reporting import Result, options_of, report, say
from zerotune.agent.agreement.agreement import DECIDE_S
from zerotune.store.errors import UserError

RUNTIMES: Final = ("fsdp2", "zero_runtime")
EVENTS: Final = (
    "kill_daemon", "stop_daemon", "send_garbage", "imitate_daemon", "fill_disk", "jump_clock", "kill_rank", "harm_line",
)  # fmt: skip
QUICK_JOBS: Final = ("zero_runtime",)
QUICK_EVENTS: Final = tuple(name for name in EVENTS if name != "kill_rank")
"""Restarting a job takes torch too long."""
QUICK_S: Final = 30.0
"""Of chaos, at most."""
QUICK_ENDS_S: Final = 30.0
"""Chaos ends so long after the run began: its processes take ten seconds to end."""
ROUND_S: Final = 300.0
"""Of a long run; each round starts the jobs anew."""
WARM_UP_STEPS: Final = 5


@contextlib.contextmanager
def begun(folder: Path, arguments: argparse.Namespace, *, with_agent: bool) -> Iterator[Chaos]:
    """Daemons with their jobs; all of them are ended afterwards. Raises UserError if two nodes cannot be had."""
    folder.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        networks = stack.enter_context(two_namespaces()) if arguments.nodes == 2 else ()
        chaos = Chaos(folder, argparse.Namespace(**{**vars(arguments), "with_agent": with_agent}), networks)
        stack.callback(chaos.close)
        yield chaos


def at_once(some: Sequence[Chaos], seconds: float, by_s: float) -> None:
    with ThreadPoolExecutor(len(some)) as pool:
        try:
            list(pool.map(lambda chaos: chaos.run(seconds, by_s=by_s), some))
        except BaseException:
            for chaos in some:
                chaos.is_over.set()
            raise


def worst_ms(chaos: Chaos, name: str) -> float:
    starts = [lines for job in chaos.jobs for lines in job.steps("*").values()]
    return max((one[name] for lines in starts for one in lines[WARM_UP_STEPS:]), default=0.0)


def losses(tuned: Chaos, untuned: Chaos) -> list[tuple[object, object]]:
    """Losses with and without the agent, of the steps that both reached."""
    found = []
    for job, twin in zip(tuned.jobs, untuned.jobs, strict=True):
        expected = max(twin.steps().values(), key=len, default=[])
        for lines in job.steps().values():
            found += [(one["loss"], there["loss"]) for one, there in zip(lines, expected, strict=False)]
    return found


def play(arguments: argparse.Namespace, seconds: float, n_deaths: float) -> dict[str, float]:
    """One round, with the agent and without. Raises UserError if two nodes cannot be had."""
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True)))
        tuned = stack.enter_context(begun(folder / "tuned", arguments, with_agent=True))
        nodes, jobs = tuned.nodes, tuned.jobs
        if arguments.quick:  # both beside each other, at once
            untuned = stack.enter_context(begun(folder / "untuned", arguments, with_agent=False))
            at_once([tuned, untuned], seconds, began_s + QUICK_ENDS_S)
        else:
            tuned.run(seconds, n_deaths)
            untuned = stack.enter_context(begun(folder / "untuned", arguments, with_agent=False))
            untuned.run(seconds, n_steps=max(job.n_steps_at_most() for job in jobs))
        rows = [node.rows() for node in nodes]
        compared = losses(tuned, untuned)
        logs = "".join(job.log.read_text(errors="replace") for job in jobs)
        return {
            **{f"events@{name}": n for name, n in tuned.events.items()},
            "seconds": seconds,
            "events": tuned.events.total(),
            "daemon_deaths": tuned.n_deaths,
            "daemon_deaths_while_recording": sum(node.n_deaths_while_recording for node in nodes),
            "steps": sum(len(lines) for job in jobs for lines in job.steps().values()),
            "steps_in_the_store": sum(one.n_steps(under_a_plan=False) for one in nodes),
            "steps_under_a_plan": sum(one.n_steps(under_a_plan=True) for one in nodes),
            "hangs": tuned.n_hangs,
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
            "worst_wait_ms": worst_ms(tuned, "waited"),
        }


def results(figures: dict[str, float], events: Sequence[str]) -> list[Result]:
    """A run counts only if at least half of its steps ran under a plan and every kind of event came."""
    worst, twin = figures["worst_step_ms"], figures["worst_untuned_step_ms"]
    under_a_plan = figures["steps_under_a_plan"] / max(1.0, figures["steps_in_the_store"])
    came = {name.removeprefix("events@") for name, n in figures.items() if name.startswith("events@") and n}
    return [
        *(Result(name, figures[name], "events") for name in sorted(figures) if name.startswith("events@")),
        Result("events", figures["events"], "events", "> 0"),
        Result("daemon_deaths", figures["daemon_deaths"], "deaths", "> 0"),
        Result("daemon_deaths_while_recording", figures["daemon_deaths_while_recording"], "deaths", "> 0"),
        Result("steps", figures["steps"], "steps", "> 0"),
        Result("steps_under_a_plan", figures["steps_under_a_plan"], "steps in the store", "> 0"),
        Result("steps_under_a_plan_share", under_a_plan, "of those in the store", ">= 0.5"),
        Result("kinds_of_event_missing", len(set(events) - came), "kinds", "0"),
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
        Result("worst_wait_ms", figures["worst_wait_ms"], "ms", f"<= {1000 * (DECIDE_S + 0.5):.0f}"),
    ]


def play_rounds(arguments: argparse.Namespace) -> dict[str, float]:
    """Play rounds until the minutes or the deaths are reached. Raises UserError if two nodes cannot be had."""
    done: dict[str, float] = {}
    n_rounds_played = 0
    while True:
        left_s = 60.0 * arguments.minutes - done.get("seconds", 0.0)
        n_left = arguments.deaths - done.get("daemon_deaths", 0)
        if done and (left_s <= 0.0 or n_left <= 0 or done["hangs"] or arguments.quick):
            return done
        n_rounds = max(1, math.ceil(left_s / ROUND_S))
        if not arguments.quick:
            say(f"{n_rounds_played} rounds have ended, {n_rounds} are left at most")
        seeded = {**vars(arguments), "seed": arguments.seed + 1000 * n_rounds_played}
        found = play(argparse.Namespace(**seeded), QUICK_S if arguments.quick else left_s / n_rounds, n_left)
        n_rounds_played += 1
        for name, value in found.items():
            before = done.get(name, 0)
            done[name] = max(before, value) if name.startswith("worst_") else before + value


def main() -> None:
    parser = options_of(__doc__, quick="as much as fits into a minute")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of chaos, with the agent")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="that each job spans; 2 needs root")
    parser.add_argument("--jobs", nargs="+", choices=RUNTIMES, metavar="JOB", help=", ".join(RUNTIMES))
    parser.add_argument("--events", nargs="+", choices=EVENTS, metavar="EVENT", help=", ".join(EVENTS))
    parser.add_argument("--deaths", type=positive, default=math.inf, metavar="N", help="end once so many daemons died")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.jobs = arguments.jobs or (QUICK_JOBS if arguments.quick else RUNTIMES)
    arguments.events = arguments.events or (QUICK_EVENTS if arguments.quick else EVENTS)
    if arguments.nodes == 1:
        arguments.events = [name for name in arguments.events if name != "harm_line"]
    if not set(arguments.events) - {"kill_rank"}:
        parser.error(f"--events {' '.join(arguments.events)}: name another one of one node, or use --nodes 2")
    try:
        figures = play_rounds(arguments)
    except UserError as error:
        parser.error(str(error))
    report("chaos", results(figures, arguments.events), as_json=arguments.json)


if __name__ == "__main__":
    main()
