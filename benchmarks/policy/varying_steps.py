"""Jobs whose steps differ by training's own doing: how much of the gain they have, and what exploring costs them.

    python -m benchmarks varying_steps [--json] [--quick]

Batches of five lengths, computation of two, computation that scatters by 30 %, validation in ten steps of each hundred,
checkpoints, a busy host; `steady` steps are the peer of all. Reported is which share of what the best settings would
save a job of 600 steps has, and its last 120 steps; what exploration cost; and how often the tuner took steps for a
lasting change of pace, after which nothing is tried for a while. On a busy host also: the step by which a job has 95 %
of the gain. Where nothing is to be gained (as_believed) there is no share. With steady steps computation takes as long
as communication. Emulated truth, not NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

import numpy as np

from benchmarks.lib.reporting import Result, options_of, report
from benchmarks.lib.simulated.brain_world import Call, Varying, make_brain, play
from benchmarks.lib.simulated.host_view import AS_A_GPU_TELLS, seen_as
from benchmarks.policy.brain_safety import zero_calls
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE

FABRICS = ("h100_ib_2", "ethernet_boxes", "as_believed")
KINDS = ("steady", "batches", "two_lengths", "scattered", "validation", "checkpoints", "busy_host")
N_STEPS, N_LAST = 600, 120
REACHED = 0.95
LEAST_GAIN = 0.002
"""Share of a step; below, there is nothing to gain."""


def played(name: str, kind: str, n_runs: int) -> Iterator[Result]:
    """One fabric, one kind of steps.

    Args:
        name: of the fabric.
        kind: of steps, see `Varying`.
        n_runs: jobs.

    Yields:
        What they gain and lose.
    """
    runs = [_job(name, kind, 3000 + seed) for seed in range(n_runs)]
    saved, attainable, last_saved, last_attainable, extra, spent, n_pace, until = np.array(runs).T
    which = f"{name}:{kind}"
    if attainable.mean() >= LEAST_GAIN:
        yield Result(f"share_of_gain@{which}", 100.0 * mean(saved / attainable), "%")
        yield Result(f"share_of_gain_in_the_end@{which}", 100.0 * mean(last_saved / last_attainable), "%")
        if kind == "busy_host":
            yield Result(f"steps_without_decision_on_a_busy_host@{name}", until.max(), "steps", "<= 400")
    yield Result(f"longer_than_default_worst@{which}", 100.0 * extra.max(), "% of step time", "<= 0.5")
    yield Result(f"budget_spent_worst@{which}", spent.max(), "% of step time", "<= 1")
    yield Result(f"changes_of_pace@{which}", n_pace.mean(), "per job")


def _job(name: str, kind: str, seed: int) -> tuple[float, ...]:
    machine = fabric.load(name)
    calls = zero_calls((15, 18, 21, 24))
    world = Varying(name, machine.communicator(range(min(16, machine.max_ranks))), calls, seed=seed)
    world.kind, world.whole = kind, calls
    world.compute_us = sum(world.truth(call, BASELINE)[0] for call in calls)
    brain = make_brain(world)
    offered = {call.collective: brain.costs.candidates(world.communicator, call.collective) for call in calls}
    best_us: dict[Call, float] = {}
    times_us = np.zeros((3, N_STEPS))
    steps_us = np.zeros(N_STEPS)
    for step in range(N_STEPS):
        now, computes = world.now()
        for call in now:
            if call not in best_us:
                best_us[call] = world.best(call, offered[call.collective])
            usual_us, ours_us = world.truth(call, BASELINE)[0], world.truth(call, world.chosen(call))[0]
            times_us[:, step] += usual_us, ours_us, best_us[call]
        steps_us[step] = computes * world.compute_us + times_us[0, step]
        play(world, brain, 1)
    usual, ours, best = times_us / steps_us.sum()
    is_there = usual - ours >= REACHED * (usual - best)
    last = slice(N_STEPS - N_LAST, None)
    return (
        (usual - ours).sum(),
        (usual - best).sum(),
        (usual - ours)[last].sum(),
        (usual - best)[last].sum(),
        (ours - usual).sum(),
        brain.spent_percent,
        sum(one.kind == "pace" for one in brain.decisions()),
        int(np.argmax(is_there)) if is_there[-N_LAST:].mean() > 0.5 else N_STEPS,
    )


def main() -> None:
    parser = options_of(__doc__, quick="one run of two kinds on one fabric; ends within 60 s")
    arguments = parser.parse_args()
    names, kinds, n_runs = (FABRICS[:1], ("steady", "two_lengths"), 1) if arguments.quick else (FABRICS, KINDS, 3)
    with seen_as(AS_A_GPU_TELLS):
        results = [result for name in names for kind in kinds for result in played(name, kind, n_runs)]
    report("varying_steps", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
