"""The safety of the policy, in figures: guard, regimes, shared noise, budget, warm start.

python -m benchmarks brain_safety [--quick] [--json]

The brain plays whole jobs on shipped fabrics with seeded noise, so that figures are the same on any machine. It gets a
GPU's data: three steps late, without exposure. The guard and the change detector also get pure noise, for false alarms.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.lib.reporting import Result, options_of, report
from benchmarks.lib.simulated.brain_world import (
    ALONE,
    NINE,
    Call,
    NothingToGain,
    Unsteady,
    World,
    decided,
    make_brain,
    play,
    secretly_slow_job,
)
from benchmarks.lib.simulated.host_view import AS_A_GPU_TELLS, seen_as
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, Phase
from zerotune.store.sqlite.database import Store
from zerotune.tuner.learning.brain import Brain
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.learning.policy.change_detection import ChangeDetector, FinishedSteps
from zerotune.tuner.modeling import trainer

IN_TURNS = "compared in turns"
"""In the reason of a withdrawal because of step times."""
GATHER, SCATTER = Collective.all_gather, Collective.reduce_scatter


def zero_calls(exponents: tuple[int, ...], n_each: int = 2) -> list[Call]:
    """A ZeRO-like step: gathers and scatters of these sizes."""
    return [
        call
        for exponent in exponents
        for call in [Call(GATHER, Phase.forward_gather, 1 << exponent)] * n_each
        + [Call(SCATTER, Phase.gradient_scatter, 1 << exponent)] * n_each
    ]


class SlowPromotion(NamedTuple):
    """A job in which two promotions come together, and one of them slows steps down by 2 %."""

    delay: float | None
    """Steps with the slow one from its promotion until it is withdrawn, 120 if it never is; None: never promoted."""
    n_slow: int
    """All slow steps, including trials."""
    is_innocent_withdrawn: bool
    """The good one was withdrawn, if only for a time."""
    is_good_kept: bool
    """It is there in the end."""


def slow_promotion(seed: int, step_noise: float) -> SlowPromotion:
    """Play one job of 120 steps; `step_noise` is the spread (log) of steps."""
    world = World(
        "ethernet_boxes",
        fabric.load("ethernet_boxes").communicator(range(16)),
        zero_calls((17,)),
        seed=seed,
        step_noise=step_noise,
        compute_us=100_000.0,
    )
    brain = make_brain(world)
    n_slow, before, delay, base_us = 0, None, None, world.compute_us
    withdrawn: set[Collective] = set()
    for _ in range(120):
        promoted = any(s.incumbent != BASELINE for s in brain.keys if s.key.collective is GATHER)
        runs = any(row.collective is GATHER for row in world.plan.rows)
        world.compute_us = base_us * (1.02 if runs else 1.0)
        if promoted and runs and before is None:
            before = n_slow
        n_slow += runs
        play(world, brain, 1)
        told = {one.key.collective for one in brain.decisions() if IN_TURNS in one.reason}
        if before is not None and delay is None and GATHER in told:
            delay = n_slow - before
        withdrawn |= told
    if before is not None and delay is None:
        delay = 120
    is_good_kept = any(s.incumbent != BASELINE for s in brain.keys if s.key.collective is SCATTER)
    return SlowPromotion(delay, n_slow, SCATTER in withdrawn, is_good_kept)


def guard_in_a_job(n_runs: int, step_noise: float) -> Iterator[Result]:
    """Two promotions come together, one of them slows steps down by 2 %."""
    noise = f"at_{100 * step_noise:g}_percent_noise"
    jobs = [slow_promotion(seed, step_noise) for seed in range(n_runs)]
    delays = [job.delay for job in jobs if job.delay is not None] or [math.nan]
    innocent, good = (100 * sum(ones) / n_runs for ones in list(zip(*jobs, strict=True))[2:])
    yield Result(f"slow_promotion_withdrawn_after_median_{noise}", median(delays), "steps", "<= 10")
    yield Result(f"slow_promotion_withdrawn_after_p90_{noise}", float(np.quantile(delays, 0.9)), "steps", "<= 10")
    before = 100 * sum(job.delay is None for job in jobs) / n_runs
    yield Result(f"withdrawn_before_it_is_promoted_{noise}", before, "% of runs")
    yield Result(f"slow_steps_in_all_median_{noise}", median(job.n_slow for job in jobs), "of 120 steps")
    yield Result(f"good_promotion_withdrawn_on_the_way_{noise}", innocent, "% of runs")
    yield Result(f"good_promotion_kept_beside_it_{noise}", good, "% of runs")


def decided_us(world: World, brain: Brain) -> np.ndarray:
    """True microseconds of the decided setting of each call."""
    setting_of = decided(brain)
    return np.array([world.truth(call, setting_of(call))[0] for call in world.calls])


def regimes(n_runs: int, n_calls: int) -> Iterator[Result]:
    """Calls per key until a slowdown of the network is noticed; false alarms; the old regime recognised."""
    for slowdown in (1.05, 1.10, 1.30):
        delays = []
        for seed in range(n_runs):
            world = World(
                "h100_node",
                fabric.load("h100_node").communicator(range(8)),
                zero_calls((18, 21, 24)),
                seed=seed,
                noise=0.03,
                step_noise=0.01,
            )
            brain = make_brain(world)
            play(world, brain, 60)
            before = brain.regime
            world.slowdown = {GATHER.name: slowdown, SCATTER.name: slowdown}
            n_steps = next(
                (step for step in range(1, 101) if play(world, brain, 1) is not None and brain.regime != before), 101
            )
            delays.append(2 * n_steps)  # every key is called twice per step
        percent = round(100 * (slowdown - 1))
        for name, quantile in (("", 0.5), ("_p90", 0.9)):
            figure = f"regime_calls_to_notice_{percent}_percent{name}"
            yield Result(figure, float(np.quantile(delays, quantile)), "calls per key", "<= 50")
    detector, rng, n_false = ChangeDetector(), np.random.default_rng(5), 0
    for _ in range(n_calls // 1000):
        residuals = rng.standard_normal(1000)
        if len(detector.update(FinishedSteps(rng.integers(0, 5, 1000), residuals, residuals))):
            n_false += 1
            detector.reset()
    yield Result("regime_false_alarms_per_100000_calls_noise_only", n_false / (n_calls / 1e5), "alarms", "<= 1")
    for kind in ("", "slow_steps", "weather", "drift"):
        n_seen = n_changes = 0
        for seed in range(max(1, n_runs // 5)):
            world = Unsteady(
                "h100_node",
                fabric.load("h100_node").communicator(range(8)),
                zero_calls((18, 21, 24), n_each=8),
                seed=100 + seed,
                noise=0.03,
                step_noise=0.01,
                kind=kind,
            )
            brain = make_brain(world)
            play(world, brain, 250)
            n_seen, n_changes = n_seen + world.n_calls, n_changes + brain.n_regimes - 1
        target = "<= 1" if kind in ("", "slow_steps") else ""
        name = f"regime_false_alarms_per_100000_calls_in_jobs{'_with_' * bool(kind)}{kind}"
        yield Result(name, n_changes / (n_seen / 1e5), "alarms", target)
    back = 0
    for seed in range(n_runs):
        place = fabric.load("ethernet_boxes").communicator(range(16))
        world = World("ethernet_boxes", place, zero_calls((17, 20, 23)), seed=seed, compute_us=100_000.0)
        brain = make_brain(world)
        play(world, brain, 80)
        before_us = decided_us(world, brain)
        world.slowdown = {GATHER.name: 1.6, SCATTER.name: 1.6}
        play(world, brain, 40)
        world.slowdown = {}
        play(world, brain, 12)
        # A later find may have replaced something; nothing may be lost.
        back += int(brain.regime == 0 and bool(np.all(decided_us(world, brain) <= before_us)))
    yield Result("old_regime_recognised_within_12_steps", 100 * back / n_runs, "% of runs")


def shared_noise(n_runs: int, n_steps: int) -> Iterator[Result]:
    """Noise that neighbouring steps share: false promotions among equal settings, and losses among slower ones."""
    for kind in ("", "weather", "congestion", "bursts"):
        n_promoted = n_keys = 0
        for seed in range(n_runs):
            place = fabric.load("h100_node").communicator(range(8))
            calls = zero_calls((18, 21, 24))
            same = Unsteady("h100_node", place, calls, seed=200 + seed, flat=True, kind=kind)
            brain = make_brain(same)
            play(same, brain, n_steps)
            n_keys += brain.n_keys
            n_promoted += len({one.key for one in brain.decisions() if one.kind == "promote"})
        name = kind or "noise_of_steps_alone"
        yield Result(f"keys_that_promote_{name}", 100 * n_promoted / n_keys, f"% of {n_keys}", "<= 1")
        lost = lost_where_nothing_is_to_gain(n_runs, n_steps, kind)
        yield Result(f"nothing_to_gain_lost_with_{name}", lost, "% of steps", "<= 0.5")


def lost_where_nothing_is_to_gain(n_runs: int, n_steps: int, kind: str = "") -> float:
    """Exploration cost (percent of steps) if all but NCCL's own choice is slower, under noise of this kind."""
    lost_us = all_us = 0.0
    for seed in range(n_runs):
        calls = zero_calls((18, 21, 24))
        place = fabric.load("h100_node").communicator(range(8))
        world = NothingToGain("h100_node", place, calls, seed=200 + seed, kind=kind)
        usual_us = sum(world.truth(call, BASELINE)[0] for call in calls)
        world.compute_us = 0.5 * usual_us
        brain = make_brain(world)
        for _ in range(n_steps):
            lost_us += sum(world.truth(call, world.chosen(call))[0] for call in calls) - usual_us
            all_us += world.compute_us + usual_us
            play(world, brain, 1)
    return 100.0 * lost_us / all_us


def secretly_slow(n_runs: int, n_alike: int) -> Iterator[Result]:
    """Jobs in which every setting but NCCL's choice takes 1 % less in calls and makes steps slower.

    With one key, and with nine that add as much in all. `n_alike` jobs have no slower step: false alarms are rare.
    """
    n_steps = 1200
    for name, calls, slowdowns in (("one_key", ALONE, (0.5, 0.1, 0.03, 0.0)), ("nine_keys", NINE, (0.1, 0.03, 0.0))):
        for slow in slowdowns:
            lost, n_slow, n_withdrawn = [], [], 0
            n_jobs = n_runs if slow else n_alike
            for seed in range(20, 20 + n_jobs):
                world = secretly_slow_job(calls, slow, seed)
                brain = make_brain(world)
                play(world, brain, n_steps)
                lost.append(100.0 * world.lost / n_steps)
                n_slow.append(world.n_slow)
                n_withdrawn += any(IN_TURNS in decision.reason for decision in brain.decisions())
            which = f"{name}_{100 * slow:g}_percent"
            if not slow:
                yield Result(f"withdrawn_for_nothing@{which}", 100 * n_withdrawn / n_jobs, "% of jobs", "<= 1")
                continue
            yield Result(f"lost_in_secret@{which}", float(np.mean(lost)), "% of step time", "<= 0.5")
            yield Result(f"lost_in_secret_worst@{which}", max(lost), "% of step time", "<= 1")
            yield Result(f"slow_steps@{which}", median(n_slow), f"of {n_steps} steps")


def warm_start() -> Iterator[Result]:
    """Explored calls of the first, second and third job on one fabric, and the share of the gain at the end of each."""
    for name in ("ethernet_boxes", "h100_node"):
        machine = fabric.load(name)
        place = machine.communicator(range(min(16, machine.max_ranks)))
        with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "s.db") as store:
            for run in range(1, 4):
                world = World(name, place, zero_calls((15, 18, 21, 24)), seed=run, compute_us=100_000.0)
                store.record_job(f"job-{run}", machine.fabric_id, machine.describe(), place.n_ranks)
                brain = make_brain(world, Knowledge.from_store(store, machine.fabric_id))
                gained = _play_and_record(world, brain, store, f"job-{run}", n_steps=100)
                if model := trainer.train(store, machine.fabric_id):
                    trainer.keep(store, model)
                    store.flush()
                yield Result(f"explored_calls_run_{run}@{name}", brain.n_explored, "calls")
                yield Result(f"share_of_gain_after_20_calls_run_{run}@{name}", gained, "%", ">= 95" if run > 1 else "")


def _play_and_record(world: World, brain: Brain, store: Store, job: str, n_steps: int) -> float:
    """The share of the attainable gain, in percent, that steps 10 to 20 had (20 to 40 calls per key)."""
    saved = attainable = 0.0
    for step in range(n_steps):
        for call in world.calls if 10 <= step < 20 else ():
            options = brain.costs.candidates(world.communicator, call.collective)
            saved += world.truth(call, BASELINE)[0] - world.truth(call, world.chosen(call))[0]
            attainable += world.truth(call, BASELINE)[0] - world.best(call, options)
        block, record = world.run_step()
        store.record_measurements(world.fabric.fabric_id, job, block)
        world.tell(brain, block, record)
        world.follow(brain.propose(), brain)
    store.flush()
    return 100 * saved / attainable


def main() -> None:
    arguments = options_of(__doc__, quick="fewer runs; ends within 60 s").parse_args()
    with seen_as(AS_A_GPU_TELLS):
        report("brain_safety", _results(arguments.quick), as_json=arguments.json)


def _results(quick: bool) -> list[Result]:
    n_runs = 5 if quick else 30
    return [
        *guard_in_a_job(3 * n_runs, 0.005),
        *guard_in_a_job(3 * n_runs, 0.01),
        *regimes(n_runs, 200_000 if quick else 3_000_000),
        *shared_noise(2 if quick else 10, 200 if quick else 600),
        *(secretly_slow(1, 1) if quick else secretly_slow(3, 30)),
        *warm_start(),
    ]


if __name__ == "__main__":
    main()
