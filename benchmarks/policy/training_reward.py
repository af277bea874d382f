"""Are collectives judged by their effect on training? Step time of jobs whose communication hides behind computation.

python -m benchmarks training_reward [--quick] [--json]

Training waits for forward gathers. Other collectives hide behind computation, which their channels slow down. The brain
plays jobs on simulated fabrics with a GPU's data: late, without exposure. Its last settings are then played without
noise, beside NCCL's own choice, the settings that are fastest alone, and the best in this training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median

from rich.progress import track

from benchmarks.lib.reporting import Result, options_of, report
from benchmarks.lib.simulated.brain_world import Call, OverlappedWorld, decided, make_brain, play
from benchmarks.lib.simulated.host_view import AS_A_GPU_TELLS, seen_as
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE, Candidate, Collective, Phase

GATHER, SCATTER = Collective.all_gather, Collective.reduce_scatter
PHASES = (
    (GATHER, Phase.forward_gather),
    (GATHER, Phase.backward_gather),
    (SCATTER, Phase.gradient_scatter),
    (GATHER, Phase.post_step_gather),
)
WAITED_FOR = frozenset({Phase.forward_gather})
EXPONENTS = (18, 20, 22, 24, 26)
N_EACH = 3
HIDDEN_SHARE = 0.3
"""Time of hidden collectives by NCCL's own choice, as a share of the computation."""

Choice = Callable[[Call], Candidate]


def world_of(name: str, seed: int) -> OverlappedWorld:
    machine = fabric.load(name)
    place = machine.communicator(range(min(16, machine.max_ranks)))
    calls = [
        Call(kind, phase, 1 << exponent) for exponent in EXPONENTS for kind, phase in PHASES for _ in range(N_EACH)
    ]
    world = OverlappedWorld(name, place, calls, seed=seed, waited_for=WAITED_FOR)
    world.compute_us = sum(world.truth(call, BASELINE)[0] for call in calls if call.phase not in WAITED_FOR)
    world.compute_us /= HIDDEN_SHARE
    return world


def training_us(world: OverlappedWorld, call: Call, candidate: Candidate) -> float:
    """Microseconds that training waits, and that computation is slowed down, together."""
    us, ran = world.truth(call, candidate)
    exposed_us, slowed_us = world.training_us(call.phase, us, ran.n_channels)
    return float(exposed_us + slowed_us)


def step_us(world: OverlappedWorld, chosen: Choice) -> float:
    """A step with these settings, without noise."""
    return float(world.compute_us) + sum(training_us(world, call, chosen(call)) for call in world.calls)


def judged(name: str, n_seeds: int, n_steps: int) -> Iterator[Result]:
    """Step times in percent of those with NCCL's own choice; `n_steps` is of each job."""
    world = world_of(name, 0)
    options = {
        call: make_brain(world)._costs.candidates(world.communicator, call.collective)
        for call in dict.fromkeys(world.calls)
    }
    alone = {call: min(known, key=lambda one: world.truth(call, one)[0]) for call, known in options.items()}
    best = {call: min(known, key=lambda one: training_us(world, call, one)) for call, known in options.items()}
    default_us = step_us(world, lambda _: BASELINE)
    floor_us = step_us(world, best.__getitem__)
    ours_us, spent, differing = [], [], []
    for seed in range(n_seeds):
        played = world_of(name, seed)
        brain = make_brain(played)
        play(played, brain, n_steps)
        ours = {call: decided(brain)(call) for call in options}
        ours_us.append(step_us(world, ours.__getitem__))
        spent.append(brain.spent_percent)
        forward, after = (
            [played.setting(call, ours[call]) for call in options if call.phase is phase]
            for phase in (Phase.forward_gather, Phase.post_step_gather)
        )
        differing.append(sum(one != other for one, other in zip(forward, after, strict=True)))
    percent = 100.0 / default_us
    alone_us = step_us(world, alone.__getitem__)
    yield Result(f"fastest_alone@{name}", percent * alone_us, "% of NCCL's step time")
    yield Result(
        f"ours@{name}",
        percent * median(ours_us),
        "% of NCCL's step time",
        "",
        "fastest alone",
        median(ours_us) / alone_us,
    )
    yield Result(f"ours_worst_job@{name}", percent * max(ours_us), "% of NCCL's step time", "<= 100.5")
    yield Result(f"best_in_training@{name}", percent * floor_us, "% of NCCL's step time")
    if floor_us < 0.999 * default_us:
        yield Result(f"share_of_gain@{name}", 100 * (default_us - median(ours_us)) / (default_us - floor_us), "%")
    yield Result(f"sizes_where_phases_differ@{name}", median(differing), f"of {len(EXPONENTS)} sizes")
    yield Result(f"budget_spent@{name}", max(spent), "% of step time", "<= 1")


def main() -> None:
    parser = options_of(__doc__, quick="one job of 300 steps per fabric")
    arguments = parser.parse_args()
    n_seeds, n_steps = (1, 300) if arguments.quick else (5, 1000)
    results: list[Result] = []
    with seen_as(AS_A_GPU_TELLS):
        for name in track(fabric.names(), "fabrics", transient=True):
            results += judged(name, n_seeds, n_steps)
    report("training_reward", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
