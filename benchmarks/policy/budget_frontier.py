"""What would another exploration budget buy? Time saved, against what is lost if nothing is to be gained.

    python -m benchmarks budget_frontier [--percent P ...] [--picture FILE] [--quick] [--json]

Ours plays from nothing on the machines of `policy_regret --family`: as they are, and as if NCCL's own choice were the
best everywhere. Peers have no budget; each is one point. Shares are of step time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.lib.argument_types import a_file_to_write, percent
from benchmarks.lib.data.machine_family import draw, with_tails
from benchmarks.lib.reporting import Result, report
from benchmarks.policy.family_figures import N_MACHINES, QUICK_MOST_KEYS, family_peers, played
from benchmarks.policy.recorded_figures import JUDGED_CALLS
from benchmarks.policy.regret_jobs import COMM_SHARE_OF_STEP, Ours, play
from benchmarks.policy.regret_policies import Later
from zerotune.tuner.learning.brain import BrainSettings
from zerotune.tuner.learning.knowledge import Knowledge

PERCENTS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
FIRST_SEED: Final = 2000
MOST_KEYS: Final = 60
"""Machines of more keys are left out: a job of theirs takes minutes."""


class Point(NamedTuple):
    """One machine, in percent of step time."""

    policy: str
    saved: float
    lost: float
    """If NCCL's own choice is the best everywhere."""


def points(seed: int, percents: Sequence[float], most_keys: int) -> list[Point]:
    """What every policy did on one machine; none if it has too many keys."""
    machine = draw(seed)
    if len(machine.problems) > most_keys:
        return []
    found: dict[str, list[float]] = {}
    for keys in (machine.problems, machine.with_nothing_to_gain()):
        ours = [
            Ours(f"{one:g} %", keys, {}, Knowledge(), machine.looks_every, BrainSettings(budget_fraction=one / 100),
                 view=machine.view, compute_noise=machine.step_noise)
            for one in percents
        ]  # fmt: skip
        peers = [Later(one, machine.view.host_ahead) for one in family_peers(keys, np.random.default_rng(0))]
        policies = [*ours, *peers]
        for policy, arms in zip(policies, play(keys, policies, JUDGED_CALLS, 0, with_tails), strict=True):
            found.setdefault(policy.name, []).append(100.0 * COMM_SHARE_OF_STEP * played(keys, arms).saved)
    return [Point(name, saved, -lost) for name, (saved, lost) in found.items()]


def draw_frontier(results: Sequence[Result], path: str) -> None:
    """Write a picture of what is saved against what is lost, by all that save anything."""
    by_name: dict[str, dict[str, float]] = {}
    for result in results:
        metric, _, name = result.metric.partition("@")
        by_name.setdefault(name, {})[metric] = result.value
    places = {name: (one["lost_mean"], one["saved_mean"]) for name, one in by_name.items() if one["saved_mean"] > 0.0}
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for marker, of_ours in ("o-", True), ("x", False):
        shown = [place for name, place in places.items() if name.endswith(" %") is of_ours]
        axes.plot(*zip(*shown, strict=True), marker)
    for name, place in places.items():
        axes.annotate(name, place, textcoords="offset points", xytext=(5, -10))
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_xlabel("lost if NCCL's own choice is the best, % of step time")
    axes.set_ylabel("saved in 200 steps from nothing, % of step time")
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="two budgets, and machines of few keys")
    parser.add_argument("--percent", type=percent, nargs="+", metavar="P", help="budgets in percent of step time")
    parser.add_argument("--picture", type=a_file_to_write, metavar="FILE", help="draw it, as .svg")
    arguments = parser.parse_args()
    percents = arguments.percent or (PERCENTS[1:3] if arguments.quick else PERCENTS)
    seeds = range(FIRST_SEED, FIRST_SEED + N_MACHINES)
    tasks = [(seed, percents, QUICK_MOST_KEYS if arguments.quick else MOST_KEYS) for seed in seeds]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        playing = pool.imap_unordered(_points, tasks)
        every = [*track(playing, "machines", len(tasks), console=Console(stderr=True), transient=True)]
    by_policy: dict[str, list[Point]] = {}
    for one in (point for of_machine in every for point in of_machine):
        by_policy.setdefault(one.policy, []).append(one)
    results = [Result("machines", sum(bool(one) for one in every), "machines")]
    for name, found in by_policy.items():
        results += [
            Result(f"saved_mean@{name}", float(np.mean([one.saved for one in found])), "% of step time"),
            Result(f"lost_mean@{name}", float(np.mean([one.lost for one in found])), "% of step time"),
            Result(f"lost_worst@{name}", max(one.lost for one in found), "% of step time"),
        ]
    if arguments.picture:
        draw_frontier(results[1:], arguments.picture)
    report("budget_frontier", results, as_json=arguments.json)


def _points(task: tuple[int, Sequence[float], int]) -> list[Point]:
    return points(*task)


if __name__ == "__main__":
    main()
