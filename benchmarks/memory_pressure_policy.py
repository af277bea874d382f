"""What a job gains whose devices are nearly full all the time, and what larger messages run with once they are not.

Frameworks cache what memory there is, so most large jobs run above the threshold from first to last. One process plays
brains on shipped and generated fabrics with seeded noise; all figures are the emulation's:

* share of the gain that is had with little memory, against the same job with plenty;
* a step on few_sms_node, where fewer channels train faster, with little memory and with plenty;
* the first message of twice and four times the size after memory became free, against NCCL's own choice.

Run: python benchmarks/memory_pressure_policy.py [--generated N] [--seed N] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "brain"))

from brain_world import Call, OverlappedWorld, World, decided, gain_share, make_brain, play, zero3_step
from generated_fabrics import generate
from reporting import Result, report

from agent.nccl import fabric
from store.records import BASELINE, Collective, CommunicatorClass, Phase

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


def _calls() -> list[Call]:
    gathers = [call for exponent in (16, 20, 23) for call in zero3_step(shard_bytes=1 << exponent, n_ranks=1)]
    return [*gathers, *[Call(Collective.all_reduce, Phase.gradient_scatter, 1 << 22)] * 3]


def gain_percent(name: str, place: CommunicatorClass, pressure: float, n_steps: int) -> float:
    """Share of what could be saved that is saved in the end."""
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
    world.chosen = decided(brain)
    return float(median(world.run_step()[1].duration_us for _ in range(40))) / 1000.0


def first_larger(name: str, place: CommunicatorClass, times: int) -> Iterator[tuple[float, float]]:
    """(saved, could be saved) of NCCL's own time in percent, by the first message so many times as large."""
    for exponent in SIZES:
        calls = [Call(Collective.all_reduce, Phase.gradient_scatter, 1 << exponent)] * 4
        world = World(name, place, calls, memory_pressure=LITTLE)
        brain = make_brain(world)
        play(world, brain, 80)
        world.memory_pressure = 0.6
        play(world, brain, 60)
        larger = Call(calls[0].collective, calls[0].phase, times << exponent)
        usual_us = world.truth(larger, BASELINE)[0]
        best_us = world.best(larger, brain._costs.candidates(place, larger.collective))
        yield (
            100.0 * (1.0 - world.truth(larger, world.chosen(larger))[0] / usual_us),
            100.0 * (1.0 - best_us / usual_us),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", type=int, default=0, metavar="N", help="N random fabrics, too")
    parser.add_argument("--seed", type=int, default=7000, help="first seed of what is generated")
    parser.add_argument("--quick", action="store_true", help="shorter jobs")
    parser.add_argument("--json", action="store_true", help="end in one JSON line")
    arguments = parser.parse_args()
    n_steps = 200 if arguments.quick else N_STEPS
    places = dict(SHIPPED)
    for seed in range(arguments.seed, arguments.seed + arguments.generated):
        base = BASES[seed % len(BASES)]
        places[str(generate(seed, base))] = SHIPPED[base]
    results = []
    for name, place in places.items():
        plenty, little = (gain_percent(name, place, pressure, n_steps) for pressure in (PLENTY, LITTLE))
        metric = f"gain_share {Path(name).stem}"
        results.append(Result(metric, little, "%", "", "with plenty of memory", little / plenty))
    plenty, little = (step_ms(pressure, n_steps) for pressure in (PLENTY, LITTLE))
    results.append(Result("few_sms_step", little, "ms (simulated)", "", "with plenty of memory", little / plenty))
    for times in (2, 4):
        found = [one for name, place in places.items() for one in first_larger(name, place, times)]
        saved, could = zip(*found, strict=True)
        name = f"first_message_{times}_times_as_large"
        results.append(Result(f"{name}_saved", mean(saved), "% (mean)", "> 0"))
        results.append(Result(f"{name}_saved_at_worst", min(saved), "%"))
        results.append(Result(f"{name}_could_be_saved", mean(could), "% (mean)"))
    report("memory_pressure_policy", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
