"""What a job gains whose devices are nearly full all the time, and what larger messages run with once they are not.

Frameworks cache what memory there is, so most large jobs run above the threshold from first to last. One process plays
brains on shipped and generated fabrics with seeded noise; all figures are the emulation's:

* share of the gain that is had with little memory, against the same job with plenty;
* a step on few_sms_node, where fewer channels train faster, with little memory and with plenty;
* the first message of up to four times the size after memory became free, against NCCL's own choice.

Run: python -m benchmarks memory_pressure_policy [--generated N] [--seed N] [--larger-only] [--collectives NAME ...]
                                                  [--draws N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.lib.argument_types import natural
from benchmarks.lib.data.generated_fabrics import generate
from benchmarks.lib.reporting import Result, report
from benchmarks.lib.simulated.brain_world import (
    Call,
    OverlappedWorld,
    World,
    decided,
    gain_share,
    make_brain,
    play,
    zero3_step,
)
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Collective, CommunicatorClass, Phase

PLENTY, LITTLE = 0.3, 0.97
SHIPPED = {
    "ethernet_boxes": CommunicatorClass(16, 16),
    "h100_ib_2": CommunicatorClass(16, 2),
    "h100_node": CommunicatorClass(8, 1),
    "few_sms_node": CommunicatorClass(8, 1),
}
BASES = ("ethernet_boxes", "few_sms_node", "h100_ib_2", "h100_node")
N_STEPS = 500
SIZES = range(14, 25)
"""Of the messages before larger ones come: powers of two."""
TIMES = (1.5, 2, 3, 4)
SLOWER_PERCENT = 2.0
PHASES = {
    Collective.all_reduce: Phase.gradient_scatter,
    Collective.reduce_scatter: Phase.gradient_scatter,
    Collective.all_gather: Phase.forward_gather,
}


def _calls() -> list[Call]:
    gathers = [call for exponent in (16, 20, 23) for call in zero3_step(shard_bytes=1 << exponent, n_ranks=1)]
    return [*gathers, *[Call(Collective.all_reduce, Phase.gradient_scatter, 1 << 22)] * 3]


def gain_percent(name: str, place: CommunicatorClass, pressure: float, n_steps: int) -> float:
    """Share of what could be saved that is saved in the end.

    Args:
        name: of the fabric.
        place: where the calls are.
        pressure: memory pressure, 0 to 1.
        n_steps: of the job.

    Returns:
        Percent of the time that could be saved.
    """
    world = World(name, place, _calls(), seed=1, memory_pressure=pressure)
    brain = make_brain(world)
    play(world, brain, n_steps)
    usual, best, ours = (sum(some) for some in zip(*gain_share(world, brain).values(), strict=True))
    return float(100.0 * (usual - ours) / (usual - best))


def step_ms(pressure: float, n_steps: int) -> float:
    """Where computation lacks the multiprocessors that channels hold."""
    place = fabric.load("few_sms_node").communicator(range(8))
    kinds = [(Collective.all_gather, Phase.backward_gather), (Collective.reduce_scatter, Phase.gradient_scatter)]
    calls = [Call(kind, phase, 1 << exponent) for exponent in (22, 24, 26) for kind, phase in kinds for _ in range(3)]
    world = OverlappedWorld("few_sms_node", place, calls, compute_us=30_000.0, memory_pressure=pressure)
    brain = make_brain(world)
    play(world, brain, n_steps)
    world.fixed = decided(brain)
    return float(median(world.run_step()[1].duration_us for _ in range(40))) / 1000.0


class FirstLarger(NamedTuple):
    """The first message so many times as large as any before; shares of the time that NCCL's own choice takes."""

    times: float
    saved_percent: float
    could_be_saved_percent: float
    job: str


def first_larger(name: str, place: CommunicatorClass, collective: Collective, draw: int) -> Iterator[FirstLarger]:
    """What the first larger message saves in jobs of one size, after memory became free.

    Args:
        name: of the fabric.
        place: where the calls are.
        collective: that is called.
        draw: seed of the noise.

    Yields:
        One entry per size and factor.
    """
    for exponent in SIZES:
        calls = [Call(collective, PHASES[collective], 1 << exponent)] * 4
        world = World(name, place, calls, seed=draw, memory_pressure=LITTLE)
        brain = make_brain(world)
        play(world, brain, 80)
        world.memory_pressure = 0.6
        play(world, brain, 60)
        for times in TIMES:
            larger = replace(calls[0], message_bytes=int(times * calls[0].message_bytes))
            usual_us = world.truth(larger, BASELINE)[0]
            ours_us = world.truth(larger, world.chosen(larger))[0]
            best_us = world.best(larger, brain.costs.candidates(place, collective))
            saved, could = (100.0 * (1.0 - us / usual_us) for us in (ours_us, best_us))
            yield FirstLarger(times, saved, could, f"{Path(name).stem} {collective.name} 2^{exponent}, draw {draw}")


def of_first_larger(
    places: Mapping[str, CommunicatorClass], collectives: Sequence[Collective], n_draws: int
) -> Iterator[Result]:
    """What the first larger messages save, by how much larger they are.

    Args:
        places: communicators by fabric.
        collectives: each in jobs of its own.
        n_draws: of noise.

    Yields:
        Mean and worst by factor.
    """
    found = [
        one
        for name, place in places.items()
        for collective in collectives
        for draw in range(n_draws)
        for one in first_larger(name, place, collective, draw)
    ]
    for times in TIMES:
        here = [one for one in found if one.times == times]
        name, worst = f"first_message_{times:g}_times_as_large", min(here, key=lambda one: one.saved_percent)
        yield Result(f"{name}_saved", mean(one.saved_percent for one in here), "% (mean)", "> 0")
        yield Result(f"{name}_saved_at_worst", worst.saved_percent, "%", "> -10", worst.job)
        n_slower = sum(one.saved_percent < -SLOWER_PERCENT for one in here)
        yield Result(f"{name}_slower", 100.0 * n_slower / len(here), f"% of {len(here)}, by {SLOWER_PERCENT:g} %")
        yield Result(f"{name}_could_be_saved", mean(one.could_be_saved_percent for one in here), "% (mean)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", type=natural, default=0, metavar="N", help="N random fabrics, too")
    parser.add_argument("--seed", type=natural, default=7000, help="first seed of what is generated")
    parser.add_argument("--larger-only", action="store_true", help="only what larger messages run with")
    parser.add_argument("--collectives", nargs="+", choices=[one.name for one in PHASES], default=["all_reduce"])
    parser.add_argument("--draws", type=natural, default=1, metavar="N", help="draws of noise, for larger messages")
    parser.add_argument("--quick", action="store_true", help="shorter jobs")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    n_steps = 200 if arguments.quick else N_STEPS
    places = dict(SHIPPED)
    for seed in range(arguments.seed, arguments.seed + arguments.generated):
        base = BASES[seed % len(BASES)]
        places[str(generate(seed, base))] = SHIPPED[base]
    results = []
    if not arguments.larger_only:
        for name, place in places.items():
            plenty, little = (gain_percent(name, place, pressure, n_steps) for pressure in (PLENTY, LITTLE))
            metric = f"gain_share {Path(name).stem}"
            results.append(Result(metric, little, "%", "", "with plenty of memory", little / plenty))
        plenty, little = (step_ms(pressure, n_steps) for pressure in (PLENTY, LITTLE))
        results.append(Result("few_sms_step", little, "ms (simulated)", "", "with plenty of memory", little / plenty))
    collectives = [Collective[name] for name in arguments.collectives]
    results.extend(of_first_larger(places, collectives, max(1, arguments.draws)))
    report("memory_pressure_policy", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
