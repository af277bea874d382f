"""What a job is worth to the next one if its network was slow, for a part of its life or all of it.

    python -m benchmarks slow_earlier_jobs [--json] [--quick] [--fabrics NAME ...] [--levels X ...]
        [--slow FROM:UNTIL ...] [--kinds all large simple] [--runs N]

A first job of 400 steps leaves its measurements and a model; its network is slower by a factor in some of its steps
(0:0 is none, 0:400 all of them): for all calls, for `large` ones only, or for the `simple` protocol only. The second
job's network is as usual. Reported is by how much longer its first 20 and all 200 steps are than with NCCL's own
choice, where nothing was known (`cold`) and where the first job was (`warm`); below 0 is a gain. Computation takes as
long as communication. Emulated truth, not NCCL.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.lib.argument_types import natural
from benchmarks.lib.reporting import Result, report
from benchmarks.lib.simulated.brain_world import SlowForATime, make_brain, play
from benchmarks.policy.brain_safety import zero_calls
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE
from zerotune.store.sqlite.database import Store
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling import trainer

N_FIRST, N_SECOND = 400, 200


def make_world(name: str, seed: int) -> SlowForATime:
    machine = fabric.load(name)
    n_ranks = min(16, machine.max_ranks)
    world = SlowForATime(name, machine.communicator(range(n_ranks)), zero_calls((16, 20, 22, 24)), seed=seed)
    world.compute_us = sum(world.truth(call, BASELINE)[0] for call in world.calls)
    return world


def known_after(name: str, seed: int, level: float, slow: range, kind: str) -> Knowledge:
    """What the first job leaves in the store.

    Args:
        name: of the fabric.
        seed: of its noise.
        level: factor on times while the network is slow.
        slow: steps in which it is.
        kind: calls that suffer: "all", "large" or "simple".

    Returns:
        The knowledge that the second job starts with.
    """
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as store:
        world = make_world(name, 1000 + seed)
        world.level, world.slow, world.kind, world.store = level, slow, kind, store
        fabric_id = world.fabric.fabric_id
        store.record_job("first", fabric_id, world.fabric.describe(), world.communicator.n_ranks)
        play(world, make_brain(world), N_FIRST)
        store.flush()
        if model := trainer.train(store, fabric_id):
            trainer.keep(store, model)
            store.flush()
        return Knowledge.from_store(store, fabric_id)


def longer(name: str, seed: int, knowledge: Knowledge) -> tuple[float, float]:
    """By how much steps of the second job are longer than with NCCL's own choice.

    Args:
        name: of the fabric.
        seed: of its noise.
        knowledge: that it starts with.

    Returns:
        Percent over the first 20 steps, and over all.
    """
    world = make_world(name, 2000 + seed)
    brain = make_brain(world, knowledge)
    usual_us = sum(world.truth(call, BASELINE)[0] for call in world.calls)
    extra_us = np.zeros(N_SECOND)
    for step in range(N_SECOND):
        extra_us[step] = sum(world.truth(call, world.chosen(call))[0] for call in world.calls) - usual_us
        play(world, brain, 1)
    percent = 100.0 * extra_us / (world.compute_us + usual_us)
    return float(percent[:20].mean()), float(percent.mean())


def played(name: str, levels: list[float], stretches: list[range], kinds: list[str], n_runs: int) -> Iterator[Result]:
    """One fabric under everything that may happen to the first job.

    Args:
        name: of the fabric.
        levels: factors on times while the network is slow.
        stretches: steps in which it is.
        kinds: calls that suffer.
        n_runs: pairs of jobs for each combination.

    Yields:
        Figures of the second job.
    """
    cold = [longer(name, seed, Knowledge()) for seed in range(n_runs)]
    yield from _told(f"{name}:cold", cold)
    usual = [longer(name, seed, known_after(name, seed, 1.0, range(0), "all")) for seed in range(n_runs)]
    yield from _told(f"{name}:warm", usual)
    for level in levels:
        for slow in stretches:
            for kind in kinds:
                warm = [longer(name, seed, known_after(name, seed, level, slow, kind)) for seed in range(n_runs)]
                yield from _told(f"{name}:warm_{level:g}_times_slower_{kind}_{slow.start}_to_{slow.stop}", warm)


def _told(what: str, runs: list[tuple[float, float]]) -> Iterator[Result]:
    first, whole = np.array(runs).T
    yield Result(f"longer_20_steps@{what}", float(first.mean()), "% of step time")
    yield Result(f"longer_{N_SECOND}_steps@{what}", float(whole.mean()), "% of step time")
    yield Result(f"longer_{N_SECOND}_steps_worst@{what}", float(whole.max()), "% of step time")


def stretch(text: str) -> range:
    """FROM:UNTIL in steps."""
    start, _, stop = text.partition(":")
    return range(int(start), int(stop))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one run of two cases; ends within 60 s")
    parser.add_argument("--fabrics", nargs="+", default=["h100_ib_2", "ethernet_boxes", "as_believed"])
    parser.add_argument("--levels", nargs="+", type=float, default=[1.5])
    parser.add_argument("--slow", nargs="+", type=stretch, default=[range(100, 400), range(400)], metavar="FROM:UNTIL")
    parser.add_argument("--kinds", nargs="+", choices=["all", "large", "simple"], default=["all"])
    parser.add_argument("--runs", type=natural, default=3, help="seeds of each case")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.fabrics, arguments.slow, arguments.runs = ["h100_ib_2", "as_believed"], [range(100, 400)], 1
    results = [
        result
        for name in arguments.fabrics
        for result in played(name, arguments.levels, arguments.slow, arguments.kinds, arguments.runs)
    ]
    report("slow_earlier_jobs", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
