"""Does tuning work as a GPU tells it? The device is steps behind the host, and nobody knows what was waited for.

    python -m benchmarks first_contact [--json] [--quick]

Four questions. A simulated device runs steps under plans that change all the time: is each step told with its own time
and plan, at every lag? Peer: the host's clock at the optimizer's step. Whole jobs of the policy, whose communication
mostly hides (training_reward): do variants with fewer channels begin, and how much of what is gained in lockstep with
all known is gained? Is more withdrawn for nothing then, or more lost where nothing is to be gained (guarded_jobs.py,
brain_safety.py)? Do results keep their bits under `--numerics exact`, if the order of sums goes with the
setting (rounding.py)? Simulated, no GPU.

And for each of nineteen ways in which a GPU is known to be less kind than an emulation: do the tests of it pass
(`readings_tested`), or is it open? `--quick` leaves that out. What `make rehearse` recorded is counted, not repeated.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
from rich.progress import track

from benchmarks.agent.rounding import bits_changed
from benchmarks.lib.reporting import Result, options_of, report, say
from benchmarks.lib.simulated.brain_world import Call, NothingToGain, OverlappedWorld, decided, make_brain, play
from benchmarks.lib.simulated.device import Device
from benchmarks.lib.simulated.host_view import IN_LOCKSTEP, MOST_AHEAD, HostView, seen_as
from benchmarks.policy.brain_safety import zero_calls
from benchmarks.policy.guarded_jobs import GuardedJob
from benchmarks.policy.training_reward import step_us, training_us, world_of
from benchmarks.rehearse.outcomes import OUTCOMES, Outcomes
from zerotune.agent.nccl import fabric
from zerotune.agent.steps.clock import EventClock, Reading
from zerotune.agent.steps.step_timer import StepTimer
from zerotune.store.records import BASELINE, Candidate, StepRecord
from zerotune.tuner.learning.brain import Brain

LAGS = range(MOST_AHEAD + 1)
TESTS = Path(__file__).parents[2] / "tests"
N_TIMED = 2000
STEP_US = 20_000.0
WRONG = 0.01
"""A step is told with another's time if that is off by a larger share: those of neighbouring plans differ by more."""
FABRICS = ("few_sms_node", "h100_node", "h100_ib_2", "ethernet_boxes")
GUARDED_KINDS = ("one_key_alike", "nine_keys_alike", "alike_and_hidden", "slow_promotion")


HARNESS = "plugin/test_plugin_harness.py::test_as_nccl_calls_it[plain-%s]"
READINGS: dict[str, tuple[str, ...]] = {
    "exposure is unknown": (
        "brain/steps/test_unknown_exposure.py",
        "brain/trials/test_paying.py::test_it_is_known_what_settings_in_force_save",
    ),
    "the host is ahead of the device": ("agent/test_device_time.py",),
    "torch is looked for before it is imported": (
        "agent/test_who_gets_the_agent.py::test_whoever_looked_for_torch_before",
        "agent/test_who_gets_the_agent.py::test_torch_that_is_there_already",
    ),
    "steps are replayed graphs": (
        "agent/test_hooks.py::test_replays_of_a_graph_are_steps_once_an_optimizer_steps",
        "agent/test_step_timer.py::test_steps_that_are_replayed_graphs_are_steps_of_their_own",
        "emulated/choosing/test_emulated_graphs.py",
    ),
    "a graph is captured while calls are timed": (
        "agent/test_step_timer.py::test_the_plugin_is_told_while_a_graph_is_captured",
        "agent/test_session.py",
    ),
    "ranks step unequally": ("agreement/test_agreement_threads.py", HARNESS % "agreed"),
    "NCCL reports no channels": (
        HARNESS % "kernels",
        "daemon/service/test_join.py::test_what_nccl_reports_no_channels_for_is_measured_with_those_that_ran",
    ),
    "calls share a kernel": (HARNESS % "groups",),
    "NCCL lowers channels": ("brain/trials/test_refused.py",),
    "what is the same hardware": ("agent/machine",),
    "times are those of other calls": (HARNESS % "shifts", "real_nccl/plugins/test_late.py"),
    "calls come from several threads": (
        HARNESS % "threads",
        "agreement/test_change_model.py::test_every_interleaving[two threads, a communicator each]",
    ),
    "the job's store fails": (
        "agreement/test_agreement_threads.py::test_a_store_that_fails_for_a_while_costs_nothing_but_time",
        "agreement/test_job_start_model.py",
    ),
    "torch's cache fills the device": (
        "agent/test_memory.py::test_what_torch_has_cached_is_in_use_and_told_apart",
        "daemon/service/test_service_tuning.py::test_short_memory_is_told_and_what_torch_could_do_without_apart",
        "brain/test_brain_memory.py",
    ),
    "freed layers stay in memory": (
        "zero/test_zero_collectives.py::test_a_torch_that_holds_freed_layers_is_named_with_the_remedy",
        "zero/test_zero_promises.py::test_whole_layers_alive_are_the_one_in_use_and_those_ahead",
    ),
    "communicators end without a word": (HARNESS % "lifetimes",),
    "children inherit the environment": (
        "agent/test_who_gets_the_agent.py::test_children_get_it_when_they_make_a_group_and_not_before",
    ),
    "two threads collect, ids of threads recur": (
        "agent/test_ring.py::test_of_two_threads_that_collect_at_once_one_gets_all",
        HARNESS % "lifetimes",
    ),
    "sums depend on the setting": ("brain/trials/test_exact.py", "benchmark_scripts/test_rounding.py"),
}
"""Ways of a GPU, and the tests of each, below tests/."""


class _Plans:
    """Stands for the plugin: says under which plan the calls of the step that ends were enqueued."""

    epoch = 0

    def set_step(self, step: int) -> int:
        return self.epoch

    def set_observing(self, on: bool) -> None:
        raise AssertionError(on)

    def set_capturing(self, on: bool) -> None:
        raise AssertionError(on)


class _HostClock:
    """What times steps without events: the host's clock. It is held up until the device is at most so far behind."""

    training_thread_only = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def note(self) -> Reading:
        return Reading(self._device.now_us)


def told_steps(host_ahead: int, *, has_events: bool) -> tuple[np.ndarray, int, int]:
    """Let a host enqueue steps, each under a plan that makes it faster or slower."""
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
    """Are steps told with their own times and plans?"""
    for lag in lags:
        off, n_wrong, n_lost = told_steps(lag, has_events=True)
        _, n_by_host, _ = told_steps(lag, has_events=False)
        yield Result(f"step_time_error_p99@lag_{lag}", float(np.quantile(off, 0.99)), "of step time", "<= 0.01")
        yield Result(f"misattributed_steps@lag_{lag}", n_wrong, f"of {N_TIMED}", "0")
        yield Result(f"misattributed_steps@lag_{lag}_timed_by_host", n_by_host, f"of {N_TIMED}")
        yield Result(f"steps_without_time@lag_{lag}", n_lost, f"of {N_TIMED}", "0")


class Played(NamedTuple):
    """What became of jobs of one kind."""

    gain: float
    """Share of what the settings that are best in training would gain."""
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
    """Play whole jobs."""
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


def lost_where_nothing_is_to_gain(view: HostView, n_runs: int, n_steps: int) -> float:
    """What exploring costs where all but NCCL's own choice is slower."""
    lost_us = all_us = 0.0
    with seen_as(view):
        for seed in range(n_runs):
            calls = zero_calls((18, 21, 24))
            world = NothingToGain("h100_node", fabric.load("h100_node").communicator(range(8)), calls, seed=200 + seed)
            usual_us = sum(world.truth(call, BASELINE)[0] for call in calls)
            world.compute_us = 0.5 * usual_us
            brain = make_brain(world)
            for _ in range(n_steps):
                lost_us += sum(world.truth(call, world.chosen(call))[0] for call in calls) - usual_us
                all_us += world.compute_us + usual_us
                play(world, brain, 1)
    return 100.0 * lost_us / all_us


def withdrawn_for_nothing(view: HostView, n_jobs: int) -> float:
    """In how many jobs (percent) the guard withdraws what slows nothing down."""
    found = []
    with seen_as(view):
        for kind in GUARDED_KINDS:
            for job in range(n_jobs):
                figures = GuardedJob(kind, job).figures(20)
                found.append(figures.get("withdrawn_for_nothing", figures.get("innocent_withdrawn", 0.0)))
    return mean(found)


def policy(lags: Sequence[int], *, quick: bool) -> Iterator[Result]:
    """What jobs gain and lose as a GPU tells it, beside all known in lockstep."""
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
    nothing = lost_where_nothing_is_to_gain(IN_LOCKSTEP, n_runs, n_short)
    yield Result("nothing_to_gain_lost@lockstep_all_known", nothing, "% of steps", "<= 0.5")
    for lag in lags:
        lost = lost_where_nothing_is_to_gain(HostView(lag, is_exposure_known=False), n_runs, n_short)
        yield Result(f"nothing_to_gain_lost@lag_{lag}", lost, "% of steps", "<= 0.5")
    if n_jobs:
        alarms = withdrawn_for_nothing(IN_LOCKSTEP, n_jobs)
        yield Result("guard_false_withdrawals@lockstep_all_known", alarms, "% of jobs")
        for lag in lags:
            alarms = withdrawn_for_nothing(HostView(lag, is_exposure_known=False), n_jobs)
            yield Result(f"guard_false_withdrawals@lag_{lag}", alarms, "% of jobs")


def rounded() -> Iterator[Result]:
    """Do results keep their bits if only what computes nothing is tuned? Otherwise bits must change."""
    with tempfile.TemporaryDirectory() as folder:
        exact, usual = bits_changed(Path(folder))
    yield Result("exact_mode_bits_changed", exact, "bits of results", "0")
    yield Result("bits_changed_without_exact_mode", usual, "bits of results", "> 0")


def readings() -> Iterator[Result]:
    """Of how many do all tests pass, the slow ones, too?"""
    n_tested = 0
    for what, tests in track(READINGS.items(), "readings", transient=True):
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *(str(TESTS / test) for test in tests)]
        done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            n_tested += 1
        else:
            say(f"open: {what}\n{(done.stdout + done.stderr)[-2000:]}")
    yield Result("readings_tested", n_tested, f"of {len(READINGS)}", str(len(READINGS)))
    yield Result("readings_open", len(READINGS) - n_tested, f"of {len(READINGS)}", "0")


def rehearsed(outcomes: Outcomes) -> Iterator[Result]:
    """Of the rehearsal's cases that were carried out here, with whatever torch, how many went well?"""
    share = outcomes.ok_share()
    if math.isnan(share):
        say("nothing was rehearsed here, so rehearsal_cases_ok_share is unknown: `make rehearse`")
    yield Result("rehearsal_cases_ok_share", share, "of recorded outcomes", "1")


def main() -> None:
    parser = options_of(__doc__, quick="one job, and lag 3 of the policy's; ends within 60 s")
    arguments = parser.parse_args()
    results = [*timed(LAGS), *policy([3] if arguments.quick else [0, 1, 3], quick=arguments.quick), *rounded()]
    results += rehearsed(Outcomes(OUTCOMES, afresh=False))
    if not arguments.quick:
        results += readings()
    report("first_contact", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
