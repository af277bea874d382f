"""Jobs that only step time tells about: what slows steps down in secret, and what is withdrawn or adopted for nothing.

The ablation plays them (`--guarded`). What is guilty costs step time until it is withdrawn. Where no setting changes
what a step takes, all that the step guard withdraws and all variants that are adopted are false alarms.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.lib.simulated.brain_world import (
    ALONE,
    NINE,
    Call,
    SeeminglyHidden,
    Varying,
    World,
    make_brain,
    play,
    secretly_slow_job,
)
from benchmarks.policy.brain_safety import IN_TURNS, slow_promotion, zero_calls
from benchmarks.policy.varying_steps import KINDS
from zerotune.agent.nccl import fabric
from zerotune.store.records import BASELINE

GUARDED_MARGINS = {
    "lost_in_secret": 0.05,
    "withdrawn_for_nothing": 1.0,
    "adopted_for_nothing": 1.0,
    "withdrawn_for_nothing_where_steps_vary": 5.0,
    "innocent_withdrawn": 5.0,
}
"""Points of step time, and points of percent of jobs: docs/design/ablation.md says why."""
IN_SECRET: dict[str, tuple[Sequence[Call], float]] = {
    "nine_keys_10_percent": (NINE, 0.1),
    "nine_keys_3_percent": (NINE, 0.03),
    "one_key_3_percent": (ALONE, 0.03),
    "nine_keys_alike": (NINE, 0.0),
    "one_key_alike": (ALONE, 0.0),
}
"""Calls of a step, and by which share of it all that NCCL would not choose slows it down."""
GUARDED = (*IN_SECRET, "slow_promotion", "alike_and_hidden", "alike_and_varying")
FABRICS = ("h100_node", "ethernet_boxes", "h100_ib_2")
"""One node, slow links and two fast nodes: jobs in which all settings are alike take turns on them."""
STEP_NOISE = 0.01
"""As brain_safety's noisier jobs have it (log)."""
N_STEPS = 1200
"""Steps of a job: as long as brain_safety's jobs in secret."""
SAID_OF_ADOPTED = "steps are"
"""How the reason begins for which a variant's settings are promoted."""


class GuardedJob(NamedTuple):
    """One job of a kind of GUARDED."""

    name: str
    job: int
    """Seed."""

    @property
    def place(self) -> list[str | int]:
        """What tells it from others, beside the seed of the noise."""
        return [self.name, self.job]

    def figures(self, seed: int) -> dict[str, float]:
        """One job.

        Args:
            seed: of the noise, with the job's own.

        Returns:
            Figures by the names of GUARDED_MARGINS.
        """
        noise = zlib.crc32(f"{self.name} {self.job} {seed}".encode())
        if self.name == "slow_promotion":
            return {"innocent_withdrawn": 100.0 * slow_promotion(noise, STEP_NOISE).is_innocent_withdrawn}
        if self.name in IN_SECRET:
            calls, slow = IN_SECRET[self.name]
            world = secretly_slow_job([*calls], slow, noise)
            alarms = _false_alarms(world)
            if slow:
                return {"lost_in_secret": 100.0 * world.lost / N_STEPS}
            return {"withdrawn_for_nothing": alarms[0]}
        withdrawn, adopted = _false_alarms(_alike(self.name, self.job, noise))
        if self.name == "alike_and_varying":
            return {"withdrawn_for_nothing_where_steps_vary": withdrawn}
        return {"withdrawn_for_nothing": withdrawn, "adopted_for_nothing": adopted}


def _alike(name: str, job: int, noise: int) -> World:
    """All settings take the same; steps vary by themselves, or calls are said to hide, so that variants are tried."""
    machine = fabric.load(FABRICS[job % len(FABRICS)])
    place = machine.communicator(range(min(16, machine.max_ranks)))
    calls = zero_calls((18, 21, 24))
    kind = KINDS[1 + job % (len(KINDS) - 1)]
    make: Callable[..., World] = SeeminglyHidden
    if name == "alike_and_varying":
        make = partial(Varying, kind=kind, whole=calls)
    world = make(machine.name, place, calls, step_noise=STEP_NOISE, seed=noise, flat=True)
    world.compute_us = sum(world.truth(call, BASELINE)[0] for call in calls)
    return world


def _false_alarms(world: World) -> tuple[float, float]:
    """Whether anything was withdrawn for the time of steps, and whether a variant was adopted: 100 or 0 each."""
    brain = make_brain(world)
    play(world, brain, N_STEPS)
    told = brain.decisions()
    is_withdrawn = any(IN_TURNS in one.reason for one in told)
    return 100.0 * is_withdrawn, 100.0 * any(one.reason.startswith(SAID_OF_ADOPTED) for one in told)
