"""Does tuning work with a GPU's data? The device is steps behind the host, and the exposed time is unknown.

python -m benchmarks first_contact [--json] [--quick]

It simulates a device and whole jobs, without a GPU. Four parts: attribution of times to steps and plans at every lag;
gain against lockstep with full knowledge (training_reward); losses where there is nothing to gain (brain_safety);
bits of results under `--numerics exact` (rounding.py).
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
from rich.progress import track

from benchmarks.agent.rounding import bits_changed
from benchmarks.lib.reporting import Result, options_of, report
from benchmarks.lib.simulated.brain_world import (
    ALONE,
    NINE,
    Call,
    OverlappedWorld,
    SeeminglyHidden,
    World,
    decided,
    make_brain,
    play,
    secretly_slow_job,
)
from benchmarks.lib.simulated.device import Device
from benchmarks.lib.simulated.host_view import IN_LOCKSTEP, MOST_AHEAD, HostView, seen_as
from benchmarks.policy.brain_safety import IN_TURNS, lost_where_nothing_is_to_gain, slow_promotion, zero_calls
from benchmarks.policy.training_reward import step_us, training_us, world_of
from zerotune.agent.nccl import fabric
from zerotune.agent.steps.clock import EventClock, Reading
from zerotune.agent.steps.step_timer import StepTimer
from zerotune.store.records import BASELINE, Candidate, StepRecord
from zerotune.tuner.learning.brain import Brain

LAGS = range(MOST_AHEAD + 1)
N_TIMED = 2000
STEP_US = 20_000.0
WRONG = 0.01
"""A relative error above this counts as the time of another step: neighbouring plans differ by more."""
FABRICS = ("few_sms_node", "h100_node", "h100_ib_2", "ethernet_boxes")
GUARDED_KINDS = ("one_key_alike", "nine_keys_alike", "alike_and_hidden", "slow_promotion")
GUARDED_STEPS = 1200
GUARDED_NOISE = 0.01


class _Plans:
    """A plugin that knows only the plan under which the calls of the ending step were enqueued."""

    epoch = 0

    def set_step(self, step: int) -> int:
        return self.epoch

    def set_observing(self, on: bool) -> None:
        raise AssertionError(on)

    def set_capturing(self, on: bool) -> None:
        raise AssertionError(on)


class _HostClock:
    """Times steps without events, by the host's clock. The host blocks until the device is close enough behind."""

    training_thread_only = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def note(self) -> Reading:
        return Reading(self._device.now_us)


def told_steps(host_ahead: int, *, has_events: bool) -> tuple[np.ndarray, int, int]:
    """A host enqueues steps; the plan of each makes it faster or slower."""
    rng, device, plans, lost = np.random.default_rng(host_ahead), Device(), _Plans(), []
    told: list[StepRecord] = []
    timer = StepTimer(plans, told.append, on_lost=lambda: lost.append(1))
    timer.clock = EventClock(device) if has_events else _HostClock(device)
    true_us = STEP_US * (1.0 + 0.05 * rng.permutation(N_TIMED) / N_TIMED) * np.where(np.arange(N_TIMED) % 2, 1.0, 1.1)
    for number, work_us in enumerate(true_us.tolist()):
        plans.epoch = 1 + number
        device.enqueue(work_us)
        device.run(host_ahead)
        timer.finish()
    device.run()
    timer.report_ended(is_last=True)
    off = np.array([abs(one.duration_us / true_us[one.epoch - 1] - 1.0) for one in told])
    return off, int((off > WRONG).sum()), len(lost)


def timed(lags: Sequence[int]) -> Iterator[Result]:
    for lag in lags:
        off, n_wrong, n_lost = told_steps(lag, has_events=True)
        _, n_by_host, _ = told_steps(lag, has_events=False)
        yield Result(f"step_time_error_p99@lag_{lag}", float(np.quantile(off, 0.99)), "of step time", "<= 0.01")
        yield Result(f"misattributed_steps@lag_{lag}", n_wrong, f"of {N_TIMED}", "0")
        yield Result(f"misattributed_steps@lag_{lag}_timed_by_host", n_by_host, f"of {N_TIMED}")
        yield Result(f"steps_without_time@lag_{lag}", n_lost, f"of {N_TIMED}", "0")


class Played(NamedTuple):
    gain: float
    """Share of the gain of the best settings in training."""
    begin: float
    """Share of jobs in which a variant began."""
    spent: float
    """Percent of step time, the most of any job."""


def _best_us(world: OverlappedWorld, brain: Brain) -> float:
    """A step with the settings that are best in this training."""
    best: dict[Call, Candidate] = {}
    for call in dict.fromkeys(world.calls):
        offered = brain.costs.candidates(world.communicator, call.collective)
        best[call] = min(offered, key=partial(training_us, world, call))
    return step_us(world, best.__getitem__)


def played(view: HostView, names: Sequence[str], n_seeds: int, n_steps: int) -> Played:
    gains, begins, spent = [], [], []
    with seen_as(view):
        for name in names:
            for seed in range(n_seeds):
                world = world_of(name, seed)
                brain = make_brain(world)
                usual_us, best_us = step_us(world, lambda _: BASELINE), _best_us(world, brain)
                play(world, brain, n_steps)
                gains.append((usual_us - step_us(world, decided(brain))) / (usual_us - best_us))
                begins.append(any(one.kind == "variant" for one in brain.decisions()))
                spent.append(brain.spent_percent)
    return Played(mean(gains), mean(begins), max(spent))


def _guarded(kind: str, job: int, seed: int) -> World:
    """A job in which no setting changes the step time; some settings claim to hide."""
    if kind != "alike_and_hidden":
        return secretly_slow_job(ALONE if kind == "one_key_alike" else NINE, 0.0, seed)
    machine = fabric.load(("h100_node", "ethernet_boxes", "h100_ib_2")[job % 3])
    calls = zero_calls((18, 21, 24))
    place = machine.communicator(range(min(16, machine.max_ranks)))
    world = SeeminglyHidden(machine.name, place, calls, step_noise=GUARDED_NOISE, seed=seed, flat=True)
    world.compute_us = sum(world.truth(call, BASELINE)[0] for call in calls)
    return world


def withdrawn_for_nothing(view: HostView, n_jobs: int) -> float:
    """The percentage of jobs in which the guard withdraws a harmless setting."""
    found = []
    with seen_as(view):
        for kind in GUARDED_KINDS:
            for job in range(n_jobs):
                seed = zlib.crc32(f"{kind} {job} 20".encode())
                if kind == "slow_promotion":
                    found.append(slow_promotion(seed, GUARDED_NOISE).is_innocent_withdrawn)
                    continue
                world = _guarded(kind, job, seed)
                brain = make_brain(world)
                play(world, brain, GUARDED_STEPS)
                found.append(any(IN_TURNS in one.reason for one in brain.decisions()))
    return 100.0 * mean(found)


def policy(lags: Sequence[int], *, quick: bool) -> Iterator[Result]:
    """Gains and losses of jobs with a GPU's lag, beside lockstep with full knowledge."""
    names, n_seeds, n_steps = (FABRICS[2:3], 1, 300) if quick else (FABRICS, 2, 1000)  # as long as training_reward's
    known, begin = played(IN_LOCKSTEP, names, n_seeds, n_steps), 1.0
    for lag in track(lags, "lags", transient=True):
        found = played(HostView(lag, is_exposure_known=False), names, n_seeds, n_steps)
        begin = min(begin, found.begin)
        target = ">= 0.95" if lag == 3 else ""
        ratio = found.gain / known.gain
        yield Result(f"gain_with_lag_{lag}_ratio", ratio, "of the gain in lockstep, all known", target)
        yield Result(f"budget_spent@lag_{lag}", found.spent, "% of step time, worst job", "<= 1")
    yield Result("variants_begin", begin, "share of jobs, worst lag", "1")
    found = played(HostView(3, is_exposure_known=False, has_events=False), names, n_seeds, n_steps)
    yield Result("gain_with_lag_3_ratio_timed_by_host", found.gain / known.gain, "of the gain in lockstep, all known")
    n_jobs, n_runs, n_short = (0, 1, 200) if quick else (3, 3, 400)
    views = {"lockstep_all_known": IN_LOCKSTEP}
    views |= {f"lag_{lag}": HostView(lag, is_exposure_known=False) for lag in lags}
    for name, view in views.items():
        with seen_as(view):
            lost = lost_where_nothing_is_to_gain(n_runs, n_short)
        yield Result(f"nothing_to_gain_lost@{name}", lost, "% of steps", "<= 0.5")
    for name, view in views.items() if n_jobs else ():
        alarms = withdrawn_for_nothing(view, n_jobs)
        yield Result(f"guard_false_withdrawals@{name}", alarms, "% of jobs")


def rounded() -> Iterator[Result]:
    """Bits that change in exact mode, and without it."""
    with tempfile.TemporaryDirectory() as folder:
        exact, usual = bits_changed(Path(folder))
    yield Result("exact_mode_bits_changed", exact, "bits of results", "0")
    yield Result("bits_changed_without_exact_mode", usual, "bits of results", "> 0")


def main() -> None:
    parser = options_of(__doc__, quick="one job, and lag 3 of the policy's; ends within 60 s")
    arguments = parser.parse_args()
    results = [*timed(LAGS), *policy([3] if arguments.quick else [0, 1, 3], quick=arguments.quick), *rounded()]
    report("first_contact", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
