"""Results of policies on a family of machines that they never saw: `python -m benchmarks policy_regret --family`.

Each machine is judged by jobs of 200 steps that begin with nothing, and by jobs that follow another one; every second
machine by one of 2,000 steps, too. All get a GPU's data: late and without exposure.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import IMapIterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks.lib.data.data_sets import DataSet, Problem
from benchmarks.lib.data.machine_family import Machine, draw, with_tails
from benchmarks.lib.reporting import Result
from benchmarks.lib.simulated.host_view import HostView
from benchmarks.policy.recorded_figures import JUDGED_CALLS, LEAST_GAIN, reached_95
from benchmarks.policy.regret_jobs import COMM_SHARE_OF_STEP, COMPUTE_NOISE, Ours, knowledge_after, play
from benchmarks.policy.regret_policies import BoundedThompson, Default, Later, Thompson
from zerotune.tuner.learning.knowledge import Knowledge

Floats = NDArray[np.float64]

POLICY_RELEASE: Final = 1
"""Of the policy, for the sealed seeds: raised by one in the change that records a run on them."""
N_MACHINES: Final = 48
FIRST_SEED: Final = 1000
"""Of the machines that anybody may look at."""
SEALED_FAMILY_SEEDS: Final = range(800_000 + 1000 * POLICY_RELEASE, 801_000 + 1000 * POLICY_RELEASE)
"""Of machines that judge a release of the policy once, and are then retired."""
LONG_EVERY: Final = 2
"""One machine in so many plays a job of `LONG_CALLS`, too."""
LONG_CALLS: Final = 2000
LOOKED_AT_WITHIN: Final = 1000
"""Calls of a key within which a setting must have been tried, if it has `LEAST_GAIN` to gain."""
QUICK_MOST_KEYS: Final = 12
QUICK_S: Final = 40.0
"""With --quick: most keys of a machine, and the time after which unjudged machines are left out."""
COLD, LATER, LONG = "cold", "warm", "2000"
THOMPSON: Final = (Thompson.name, BoundedThompson.name)


class Played(NamedTuple):
    """One job of a policy, in shares of the time of NCCL's own choices."""

    saved: float
    has_reached_95: bool


@dataclass(frozen=True)
class Judged:
    gain: float
    """Gain of the best settings over NCCL's own choices, as a share of calls' time."""
    jobs: Mapping[str, Sequence[Played]]
    """Ours from nothing (`cold`, `2000`) and after each kind of past; of each peer, all by name."""
    loss_where_nccl_is_best: Mapping[str, float]
    """By policy, and `2000` of ours: share by which calls took longer."""
    keys_with_gain: int = 0
    keys_never_looked_at: int = 0
    """Of one job of `LONG_CALLS`."""

    @property
    def is_promising(self) -> bool:
        """There is enough to gain for the reached share to mean something."""
        return self.gain >= LEAST_GAIN


def times_us(problems: Sequence[Problem], arms: NDArray[np.int64]) -> Floats:
    """True times of the chosen settings, in the shape of `arms` (n_keys, n_calls)."""
    return np.array([np.array(problem.truth_us)[arms[key]] for key, problem in enumerate(problems)])


def played(problems: Sequence[Problem], arms: NDArray[np.int64]) -> Played:
    """The gain of one job whose settings are `arms` (n_keys, n_calls)."""
    default_us = sum(problem.truth_us[0] for problem in problems)
    attainable_us = default_us - sum(min(problem.truth_us) for problem in problems)
    saved_us = default_us - times_us(problems, arms).sum(axis=0)
    return Played(float(saved_us.mean() / default_us), reached_95(saved_us, attainable_us))


def never_looked_at(problems: Sequence[Problem], arms: NDArray[np.int64]) -> tuple[int, int]:
    """The number of keys with something to gain, and of those that ran only NCCL's own choice for long."""
    gains = np.array([1.0 - min(problem.truth_us) / problem.truth_us[0] for problem in problems]) >= LEAST_GAIN
    return int(gains.sum()), int((gains & (arms[:, :LOOKED_AT_WITHIN] == 0).all(axis=1)).sum())


def judged(machine: Machine, *, is_long: bool, is_quick: bool = False) -> Judged:
    """Play all jobs on one machine; `is_long`: `LONG_CALLS`, too; `is_quick`: one job from nothing instead of two."""
    problems, best = machine.problems, machine.with_nothing_to_gain()

    def ours(keys: Sequence[Problem], seed: int, n_calls: int, known: Knowledge) -> tuple[Ours, NDArray[np.int64]]:
        view, noise = machine.view, machine.step_noise
        job = Ours("ours", keys, {}, known, machine.looks_every, view=view, compute_noise=noise)
        return job, play(keys, [job], n_calls, seed, with_tails)[0]

    n_calls = LONG_CALLS if is_long else JUDGED_CALLS
    jobs = [ours(problems, seed, n_calls if not seed else JUDGED_CALLS, Knowledge()) for seed in range(2 - is_quick)]
    found = {COLD: [played(problems, arms[:, :JUDGED_CALLS]) for _, arms in jobs]}
    with_gain, never = (0, 0)
    if is_long:
        found[LONG] = [played(problems, jobs[0][1])]
        with_gain, never = never_looked_at(problems, jobs[0][1])
    for name, block in _pasts(machine, jobs[-1][0], lambda keys: ours(keys, 1, JUDGED_CALLS, Knowledge())[0]):
        found[name] = [played(problems, ours(problems, 2, JUDGED_CALLS, knowledge_after(block, {}))[1])]
    where_best = ours(best, 0, n_calls, Knowledge())[1]
    lost = {COLD: max(0.0, -played(best, where_best[:, :JUDGED_CALLS]).saved)}
    if is_long:
        lost[LONG] = max(0.0, -played(best, where_best).saved)
    for seed in range(2):
        for keys in (problems, best):
            peers = [Later(one, machine.view.host_ahead) for one in family_peers(keys, np.random.default_rng(seed))]
            for peer, arms in zip(peers, play(keys, peers, JUDGED_CALLS, seed, with_tails), strict=True):
                if keys is problems:
                    found.setdefault(peer.name, []).append(played(keys, arms))
                else:
                    lost[peer.name] = max(lost.get(peer.name, 0.0), -played(keys, arms).saved)
    gain = 1.0 - sum(min(one.truth_us) for one in problems) / sum(one.truth_us[0] for one in problems)
    return Judged(gain, found, lost, with_gain, never)


def _pasts(machine: Machine, earlier: Ours, play_on: Callable[[list[Problem]], Ours]) -> Iterator[tuple[str, Floats]]:
    """Names of possible earlier jobs, and their measurements."""
    blocks = earlier.measured[:JUDGED_CALLS]
    yield LATER, np.concatenate(blocks)
    promoted = min((one.epoch for one in earlier.brain.decisions() if one.kind == "promote"), default=None)
    before = [block for block in blocks if promoted is None or block["epoch"][0] < promoted]
    yield "warm_found_nothing", np.concatenate(before or blocks[:1])  # it ended before it found anything
    for name, state in ("warm_other_machine", machine.namesake), ("warm_congestion", machine.busy):
        if state:
            yield name, np.concatenate(play_on(state).measured)


def family_peers(problems: Sequence[Problem], rng: np.random.Generator) -> list[Default]:
    """The policies that ours is compared with."""
    return [Thompson(problems, rng), BoundedThompson(problems, rng)]


def recorded_machine(data: DataSet) -> Machine:
    """A recording as a machine of which only the keys are known; lag and looks follow from its name."""
    chance = zlib.crc32(data.name.encode())
    view = HostView(chance % 4, is_exposure_known=False)
    return Machine(data.name, data.problems, [], [], view, 1 + chance // 4 % 4, COMPUTE_NOISE)


def together(found: Sequence[Judged]) -> Iterator[Result]:
    """Shares of machines, and of time."""
    yield Result("machines", len(found), "machines")
    yield Result("machines_with_gain", sum(one.is_promising for one in found), "machines")
    for kind, target in (COLD, ">= 0.75"), (LATER, ">= 0.9"), (LONG, ">= 0.95"):
        yield Result(f"reached_95_share_{kind}", _mean(_reached(found, kind)), "of jobs", target)
    names = [name for name in found[0].jobs if name != LONG]
    saved = {name: _mean([job.saved for one in found for job in one.jobs.get(name, [])]) for name in names}
    peer = max(THOMPSON, key=saved.__getitem__)
    ratio = saved[COLD] / saved[peer] if saved[peer] > 0 else float("nan")
    yield Result("net_time_saved_ratio_thompson", ratio, "ratio", ">= 1.25", peer)
    for name in names:
        yield Result(f"net_time_saved@{name}", 100.0 * saved[name], "% of calls' time")
        yield Result(f"reached_95_share@{name}", _mean(_reached(found, name)), "of jobs")
    losses = {name: [one.loss_where_nccl_is_best[name] for one in found if name in one.loss_where_nccl_is_best]
              for name in (COLD, LONG, *found[0].loss_where_nccl_is_best)}  # fmt: skip
    for name, metric, target in (COLD, "200", "<= 1"), (LONG, "2000", "<= 0.25"):
        worst = 100.0 * max(lost := losses.pop(name), default=float("nan"))
        yield Result(f"loss_where_nccl_is_best_worst_{metric}", COMM_SHARE_OF_STEP * worst, "% of step time", target)
        mean = 100.0 * COMM_SHARE_OF_STEP * _mean(lost)
        yield Result(f"loss_where_nccl_is_best_mean_{metric}", mean, "% of step time")
        yield Result(f"calls_loss_where_nccl_is_best_worst_{metric}", worst, "% of calls' time")
    for name, lost in losses.items():
        worst = 100.0 * COMM_SHARE_OF_STEP * max(lost)
        yield Result(f"loss_where_nccl_is_best_worst_200@{name}", worst, "% of step time")
    later = {name: [warm_minus_cold(one, name) for one in found if name in one.jobs]
             for name in names if name.startswith(LATER)}  # fmt: skip
    worst = max(value for values in later.values() for value in values)
    yield Result("warm_minus_cold_worst", worst, "% of step time", "<= 0.1")
    for name, values in later.items():
        yield Result(f"warm_minus_cold_mean@{name}", _mean(values), "% of step time")
        yield Result(f"warm_minus_cold_worst@{name}", max(values), "% of step time")
    yield Result("keys_with_gain", sum(one.keys_with_gain for one in found), "keys")
    yield Result("keys_never_looked_at", sum(one.keys_never_looked_at for one in found), "keys", "0")


def warm_minus_cold(one: Judged, past: str) -> float:
    """Extra time of steps after that past over steps from nothing, in percent of a step's time.

    Means over several jobs are compared, since a single job depends on chance.
    """
    saved = {name: _mean([job.saved for job in one.jobs[name]]) for name in (COLD, past)}
    return 100.0 * COMM_SHARE_OF_STEP * (saved[COLD] - saved[past])


def sealed_gap(tuned: Sequence[Judged], sealed: Sequence[Judged]) -> Iterator[Result]:
    """How much more often 95 % is reached on `tuned` machines, over the three kinds of jobs; and its standard error."""
    gaps, variances = [], []
    for kind in (COLD, LATER, LONG):
        here, there = ([float(one) for one in _reached(found, kind)] for found in (tuned, sealed))
        gaps.append(_mean(here) - _mean(there))
        variances.append(float(np.var(here) / max(1, len(here)) + np.var(there) / max(1, len(there))))
    yield Result("sealed_gap", _mean(gaps), "of jobs", "<= 0.05")
    yield Result("sealed_gap_standard_error", float(np.sqrt(_mean(variances))), "of jobs")


def _reached(found: Sequence[Judged], name: str) -> list[bool]:
    """Of each job of that name on machines with something to gain."""
    return [job.has_reached_95 for one in found if one.is_promising for job in one.jobs.get(name, [])]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def judge_family(machines: Sequence[Machine], *, is_quick: bool, until_s: float) -> list[Judged]:
    """Judge machines in as many processes as there are cores, the largest first; results come in any order.

    Args:
        is_quick: only machines of few keys, the smallest first.
        until_s: machines that are not judged by then (`time.monotonic`) are left out.
    """
    sizes = {machine.name: len(machine.problems) for machine in machines}
    chosen = sorted(machines, key=lambda machine: sizes[machine.name], reverse=not is_quick)
    tasks = [
        (machine, at % LONG_EVERY == 0, is_quick)
        for at, machine in enumerate(chosen)
        if not is_quick or sizes[machine.name] <= QUICK_MOST_KEYS
    ]
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0)), _end_quietly) as pool:
        judging = _until(pool.imap_unordered(_judged, tasks), until_s)
        return [*track(judging, "machines", len(tasks), console=Console(stderr=True), transient=True)]


def _until(judging: IMapIterator[Judged], until_s: float) -> Iterator[Judged]:
    while True:
        try:
            yield judging.next(None if math.isinf(until_s) else max(0.0, until_s - time.monotonic()))
        except (StopIteration, multiprocessing.TimeoutError):
            return


def _end_quietly() -> None:
    """Only the parent handles an interrupt; it ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _judged(task: tuple[Machine, bool, bool]) -> Judged:
    machine, is_long, is_quick = task
    return judged(machine, is_long=is_long, is_quick=is_quick)


def family_results(
    recordings: Callable[[bool], Iterator[DataSet]], *, is_quick: bool, with_sealed: bool
) -> Iterator[Result]:
    """All figures of the family, and of recordings beside it.

    Args:
        recordings: for True those that are kept aside, for False the others.
        is_quick: few small machines, within 60 s.
        with_sealed: on data that are kept aside, too.
    """
    sides = {"": range(FIRST_SEED, FIRST_SEED + N_MACHINES), "sealed_": SEALED_FAMILY_SEEDS[:N_MACHINES]}
    started_s = time.monotonic()
    found: dict[str, list[Judged]] = {}
    groups: dict[str, list[Machine]] = {}
    for side, seeds in sides.items() if with_sealed else [*sides.items()][:1]:
        groups[side] = [draw(seed) for seed in seeds]
        if measured := [recorded_machine(one) for one in recordings(bool(side))]:
            groups[f"{side}recorded_"] = measured
    for at, (prefix, machines) in enumerate(groups.items(), 1):
        until_s = started_s + QUICK_S * at / len(groups) if is_quick else math.inf
        found[prefix] = judge_family(machines, is_quick=is_quick, until_s=until_s)
        if found[prefix]:
            yield from (replace(one, metric=prefix + one.metric) for one in together(found[prefix]))
    if with_sealed:
        yield from sealed_gap(found[""], found["sealed_"])
