"""What tuning a job's environment brings and costs, on sequences of twelve jobs on one machine.

python -m benchmarks environment [--data DIR] [--machines N] [--sealed] [--quick] [--json]

Machines come from `environment_family` and the grids below DIR; `--sealed` plays seeds that nothing was chosen on.
Figures are over sequences. `first_failures`: jobs that fail under an environment that nobody had tried. `..._alike`:
all environments are equal. `@all_once` tries each once, `@best` is in hindsight, `@book` has a book of other jobs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.lib.argument_types import positive
from benchmarks.lib.data.environment_family import Machine, draw, recorded
from benchmarks.lib.reporting import Result, report
from zerotune.tuner.environment.candidates import Candidate
from zerotune.tuner.environment.trials import USUAL, JobResult, Outcome, kept, next_job

N_JOBS: Final = 12
N_MACHINES: Final = 400
N_QUICK: Final = 60
SEALED_FROM: Final = 540_000
LEAST_GAIN: Final = 0.01
"""Of a step: with less to gain, the reached share has no meaning."""
TAIL_FREEDOM: Final = 4.0

Policy = Callable[[Sequence[JobResult], Sequence[Candidate]], str]
Keeps = Callable[[Sequence[JobResult]], str]


@dataclass(frozen=True)
class Played:
    gain: float
    """In force after all jobs, as a share of the usual step."""
    best_gain: float
    lost_share: float
    saved_share: float
    has_changed: bool
    lost_jobs: int
    first_failures: int


def play(machine: Machine, policy: Policy, keeps: Keeps, seed: int) -> Played:
    """Twelve jobs; `policy` names the environment of the next job, and `keeps` the one that is kept for good."""
    rng = np.random.default_rng([seed, 55])
    candidates = [_candidate(at) for at in range(len(machine.ratios))]
    places = {str(one): at for at, one in enumerate(candidates)}
    history: list[JobResult] = []
    level = now_s = lost = saved = usual = 0.0
    failed: list[str] = []
    has_changed = False
    for _ in range(N_JOBS):
        change = policy(history, candidates)
        hours = machine.hours_apart * rng.exponential()
        now_s += 3600.0 * hours
        level += machine.wanders * math.sqrt(hours / 24.0) * rng.normal()
        n_steps = math.ceil(machine.steps * math.exp(0.5 * rng.normal()))
        noise = machine.jobs_differ * rng.standard_t(TAIL_FREEDOM) / math.sqrt(2.0)
        if change in places and machine.crashes[places[change]]:
            failed.append(change)
            history.append(JobResult(change, None, 0.0, 0, now_s, Outcome.failed))
            continue
        ratio = machine.ratios[places[change]] if change else 1.0
        step_us = 1e5 * ratio * math.exp(level + noise + machine.step_noise * rng.normal() / math.sqrt(n_steps))
        history.append(JobResult(change, step_us, machine.step_noise, n_steps, now_s, Outcome.ended))
        usual += n_steps
        lost += n_steps * max(0.0, ratio - 1.0)
        saved += n_steps * (1.0 - ratio)
        has_changed |= bool(keeps(history))
    last = keeps(history)
    gain = 1.0 - machine.ratios[places[last]] if last else 0.0
    repeated = len(failed) - len(set(failed))
    return Played(gain, machine.gain, lost / usual, saved / usual, has_changed, repeated, len(set(failed)))


def all_once(history: Sequence[JobResult], candidates: Sequence[Candidate]) -> str:
    """The usual, every environment once, then the fastest."""
    order = [USUAL, *map(str, candidates)]
    return order[len(history)] if len(history) < len(order) else fastest(history)


def fastest(history: Sequence[JobResult]) -> str:
    found = [(one.step_us, one.change) for one in history if one.step_us is not None]
    return min(found)[1] if found else USUAL


def with_book(machine: Machine) -> Policy:
    """Our policy, with a book that has the machine's calls."""
    elsewhere = {str(_candidate(at)).lower(): one for at, one in enumerate(machine.elsewhere)}
    return lambda history, candidates: next_job(history, candidates, elsewhere=elsewhere).change


def _candidate(place: int) -> Candidate:
    return Candidate("NCCL_ENVIRONMENT", str(place))


def ours(history: Sequence[JobResult], candidates: Sequence[Candidate]) -> str:
    return next_job(history, candidates).change


def figures(machines: Sequence[Machine], prefix: str = "") -> Iterator[Result]:
    policies: dict[str, Policy | None] = {"": ours, "@all_once": all_once, "@book": None}
    for name, policy in policies.items():
        keeps = fastest if name == "@all_once" else kept
        aims = {key: "" if name else aim for key, aim in AIMS.items()}
        on = [(seed, one, policy or with_book(one)) for seed, one in enumerate(machines)]
        played = [play(one, chosen, keeps, seed) for seed, one, chosen in on]
        nothing = [play(one.with_nothing_to_gain(), chosen, keeps, seed) for seed, one, chosen in on]
        promising = [one for one in played if one.best_gain >= LEAST_GAIN]
        share = _mean([one.gain for one in promising]) / _mean([one.best_gain for one in promising])
        values = {
            f"best_in_hindsight_share_after_{N_JOBS}_jobs": (share, "ratio"),
            "time_lost_share": (_mean([one.lost_share for one in played]), "ratio"),
            "time_lost_share_worst": (max(one.lost_share for one in played), "ratio"),
            "net_time_saved": (_mean([one.saved_share for one in played]), "ratio"),
            "false_change_share": (_mean([one.has_changed for one in nothing]), "ratio"),
            "jobs_lost": (_mean([one.lost_jobs for one in played]), "jobs"),
            "first_failures": (_mean([one.first_failures for one in played]), "jobs"),
        }
        if not name:
            alike = [play(one.with_all_alike(), chosen, keeps, seed) for seed, one, chosen in on]
            values["false_change_share_alike"] = _mean([one.has_changed for one in alike]), "ratio"
        for metric, (value, unit) in values.items():
            yield Result(f"{prefix}{metric}{name}", value, unit, aims.get(metric, ""))
    yield Result(f"{prefix}net_time_saved@best", _mean([one.gain for one in machines]), "ratio")
    yield Result(f"{prefix}machines", len(machines), "machines")
    yield Result(f"{prefix}machines_with_gain", sum(one.gain >= LEAST_GAIN for one in machines), "machines")


AIMS: Final = {
    f"best_in_hindsight_share_after_{N_JOBS}_jobs": ">= 0.7",
    "time_lost_share": "<= 0.02",
    "false_change_share": "<= 0.02",
    "false_change_share_alike": "<= 0.02",
    "jobs_lost": "0",
}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="grids that somebody measured")
    parser.add_argument("--machines", type=positive, default=N_MACHINES, help=f"random ones; usually {N_MACHINES}")
    parser.add_argument("--sealed", action="store_true", help="those that nothing was chosen on")
    parser.add_argument("--quick", action="store_true", help=f"{N_QUICK} machines")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    found: list[Result] = []
    first = SEALED_FROM if arguments.sealed else 0
    seeds = range(first, first + (N_QUICK if arguments.quick else arguments.machines))
    found += figures([draw(seed) for seed in seeds])
    if arguments.data is not None:
        if not arguments.data.is_dir():
            parser.error(f"--data {arguments.data} is no folder; name the one that holds the files")
        machines = [*recorded(arguments.data)]
        if not machines:
            parser.error(f"--data {arguments.data}: it has no grid with the usual environment and another one")
        found += figures(machines, "recorded_")
    report("environment", found, as_json=arguments.json)


if __name__ == "__main__":
    main()
