"""What a job is worth to the next one if its network was slow, for a part of its life or all of it.

    python -m benchmarks slow_earlier_jobs [--json] [--quick]

A first job of 400 steps leaves its measurements and a model; its network takes 1.5 times as long in the last 300 of its
steps, or in all. The second job's network is as usual. Reported is by how much longer its first 20 and all 200 steps
are than with NCCL's own choice, where nothing was known (`cold`) and where the first job was (`warm`); below 0 is a
gain. Computation takes as long as communication. Emulated truth, not NCCL.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.lib.reporting import Result, options_of, report
from benchmarks.lib.simulated.brain_world import SlowForATime, make_brain, play
from benchmarks.policy.brain_safety import zero_calls
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE
from zerotune.store.sqlite.database import Store
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling import trainer

N_FIRST, N_SECOND = 400, 200
FABRICS = ("h100_ib_2", "as_believed", "ethernet_boxes")
LEVEL = 1.5
SLOW = (range(100, 400), range(400))
"""By how much, and in which steps the network is slower."""


def make_world(name: str, seed: int) -> SlowForATime:
    machine = fabric.load(name)
    n_ranks = min(16, machine.max_ranks)
    world = SlowForATime(name, machine.communicator(range(n_ranks)), zero_calls((16, 20, 22, 24)), seed=seed)
    world.compute_us = sum(world.truth(call, BASELINE)[0] for call in world.calls)
    return world


def known_after(name: str, seed: int, slow: range) -> Knowledge:
    """What the first job leaves in the store.

    Args:
        name: of the fabric.
        seed: of its noise.
        slow: steps in which the network is slow.

    Returns:
        The knowledge that the second job starts with.
    """
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store.db") as store:
        world = make_world(name, 1000 + seed)
        world.level, world.slow, world.store = LEVEL, slow, store
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


def played(name: str, stretches: Sequence[range], n_runs: int) -> Iterator[Result]:
    """One fabric under everything that may happen to the first job.

    Args:
        name: of the fabric.
        stretches: steps in which the network is slow.
        n_runs: pairs of jobs for each of them.

    Yields:
        Figures of the second job.
    """
    yield from _told(f"{name}:cold", [longer(name, seed, Knowledge()) for seed in range(n_runs)])
    for slow in (range(0), *stretches):
        warm = [longer(name, seed, known_after(name, seed, slow)) for seed in range(n_runs)]
        which = f"_{LEVEL:g}_times_slower_all_{slow.start}_to_{slow.stop}" if slow else ""
        yield from _told(f"{name}:warm{which}", warm)


def _told(what: str, runs: list[tuple[float, float]]) -> Iterator[Result]:
    first, whole = np.array(runs).T
    yield Result(f"longer_20_steps@{what}", float(first.mean()), "% of step time")
    yield Result(f"longer_{N_SECOND}_steps@{what}", float(whole.mean()), "% of step time")
    yield Result(f"longer_{N_SECOND}_steps_worst@{what}", float(whole.max()), "% of step time")


def main() -> None:
    arguments = options_of(__doc__, quick="one run of two cases; ends within 60 s").parse_args()
    names, stretches, n_runs = (FABRICS[:2], SLOW[:1], 1) if arguments.quick else (FABRICS, SLOW, 3)
    results = [result for name in names for result in played(name, stretches, n_runs)]
    report("slow_earlier_jobs", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
